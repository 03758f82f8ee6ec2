"""Forms in JSON requests become StructuredOutputsParams, or are refused by the field's name."""

import subprocess
import sys

import pytest

from mllm_compile.errors import RequestError
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams
from mllm_compile.structured.request_dicts import structured_outputs_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"structures": [], "triggers": []}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"response_format": None, "structured_outputs": None, "guided_json": None, "temperature": 1}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_object", "json_schema": None}}, {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            {"json": SCHEMA},
        ),
        ({"response_format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}, {"json": SCHEMA}),
        ({"response_format": TAG | {"type": "structural_tag"}}, {"structural_tag": TAG | {"type": "structural_tag"}}),
        ({"structured_outputs": {"regex": "a+", "json": None}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, {"json": SCHEMA, "whitespace_pattern": " ?"}),
        ({"guided_grammar": "root ::= 'a'", "guided_json_object": False}, {"grammar": "root ::= 'a'"}),
        ({"guided_json_object": True}, {"json_object": True}),
    ],
)
def test_a_body_is_read_as_it_is_meant(body, expected):
    found = structured_outputs_of(body)
    assert found == (None if expected is None else StructuredOutputsParams(**expected))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"response_format": "json"}, r"response_format: expected an object whose type is one of text, .* got 'json'"),
        ({"response_format": {"type": "xml"}}, r"response_format: expected .* got \{'type': 'xml'\}"),
        (
            {"response_format": {"type": "json_schema"}},
            r"response_format\.json_schema: expected an object with a schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
            r"with a schema, got \{'schema': 1",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strickt": True}}},
            r"json_schema: expected no keys but .*, got 'strickt'",
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            r"response_format: expected no keys but type, got 'schema'\. Write \{'type': 'json_schema'",
        ),
        ({"response_format": {"type": "text", "json_schema": {}}}, r"expected no keys but type, got 'json_schema'"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "strict": True}},
            r"response_format: expected no keys but json_schema, type, got 'strict'",
        ),
        ({"structured_outputs": []}, r"structured_outputs: expected an object, got \[\]"),
        ({"structured_outputs": {"jsn": {}}}, r"jsn is no field of StructuredOutputsParams\. Did you mean json\?"),
        ({"structured_outputs": {}}, r"structured_outputs: expected exactly one of json, .* got none"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, r"expected exactly one of .*, got json and regex"),
        (
            {"guided_json": SCHEMA, "response_format": {"type": "json_object"}},
            r"expected one form of the answer, got response_format and guided_json",
        ),
        ({"guided_whitespace_pattern": " "}, r"expected exactly one of .*, got none"),
    ],
)
def test_a_body_that_is_wrong_is_refused_by_name(body, said):
    with pytest.raises(RequestError, match=said):
        structured_outputs_of(body)


def test_a_server_reads_bodies_without_torch():
    code = (
        "import sys, mllm_compile.structured.request_dicts; print({'torch', 'numpy', 'llguidance'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
