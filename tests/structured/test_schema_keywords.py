"""Every keyword of JSON Schema is kept to or refused, by each backend; the page says which."""

from __future__ import annotations

import re

import jsonschema
import pytest

from mllm_compile import Engine, SamplingParams, StructuredOutputsParams
from mllm_compile.structured.backend import make_backend
from tests.sample import how_to_repeat, slow_but_a_sample
from tests.structured.conftest import BACKENDS
from tests.structured.schema_judge import CASES, is_right, refusal, validator, wrong_answers
from tests.structured.schema_page import PAGE, rendered
from tests.tiny_model import tiny_config


@pytest.fixture(scope="module")
def backends(vocabulary):
    return {name: make_backend(name, vocabulary, threads=1) for name in BACKENDS}


def test_every_keyword_that_the_validators_know_has_its_schemas():
    known = jsonschema.Draft202012Validator.VALIDATORS.keys() | jsonschema.Draft7Validator.VALIDATORS.keys()
    assert set(CASES) >= known


@pytest.mark.parametrize(
    ("keyword", "name"), slow_but_a_sample([(key, name) for key in CASES for name in BACKENDS], 24)
)
def test_no_answer_that_a_backend_allows_is_against_the_schema(backends, keyword, name):
    for schema in CASES[keyword]:
        if refusal(backends[name], schema) is None:
            assert list(wrong_answers(backends[name], schema)) == [], (schema, how_to_repeat())


def test_the_page_says_what_each_backend_does_with_each_keyword(backends):
    assert PAGE.read_text(encoding="utf-8") == rendered(backends)


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_answers_of_the_model_to_each_keyword_are_what_its_schemas_describe(eager_cache, backends, name):
    schemas = [one for cases in CASES.values() for one in cases if refusal(backends[name], one) is None]
    sections = {"compile": {"backend": "eager"}, "structured_outputs": {"backend": name}}
    with Engine(tiny_config(eager_cache, **sections)) as engine:
        each = [
            SamplingParams(
                temperature=1.0,
                seed=seed,
                max_tokens=60,
                structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=True),
            )
            for schema in schemas
            for seed in range(4)
        ]
        outputs = engine.generate(["Return a new list containing"] * len(each), each)
    ended = 0
    for index, output in enumerate(outputs):
        schema = schemas[index // 4]
        if output.finish_reason == "stop":
            ended += 1
            assert is_right(validator(schema), output.text.encode()), (schema, output.text)
    assert ended > len(schemas)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "integer", "minimum": 10**17}, "minimum beyond 2\\*\\*53"),
        ({"items": {"maximum": -(2**60)}}, "maximum beyond 2\\*\\*53"),
        ({"const": {"deep": [[2**53]]}}, "const with a number beyond 2\\*\\*53"),
        ({"type": "object", "minProperties": 3}, "minProperties of more than one name"),
        ({"properties": {"a": {"exclusiveMaximum": True}}}, "exclusiveMaximum that is no number"),
        ({"minItems": -1}, "minItems that is no whole number"),
        ({"anyOf": [{"disallow": "string"}]}, "disallow, which JSON Schema no longer has"),
    ],
)
@pytest.mark.parametrize("name", BACKENDS)
def test_what_no_backend_can_keep_to_is_refused_by_its_name(backends, name, schema, said):
    told = refusal(backends[name], schema)
    assert told is not None
    assert re.search(f"{name} does not keep to all of the JSON schema: {said}", told), told


def test_multiples_that_are_too_large_together_are_refused_and_apart_are_kept(backends):
    large, larger = {"type": "integer", "multipleOf": 65537}, {"type": "integer", "multipleOf": 65539}
    assert "common multiple" in refusal(backends["llguidance"], {"allOf": [large, larger]})
    apart = {"type": "object", "properties": {"a": large, "b": larger}, "required": ["a"]}
    assert refusal(backends["llguidance"], apart) is None
    assert list(wrong_answers(backends["llguidance"], apart)) == []


def test_a_reference_to_a_place_that_is_no_keyword_s_is_followed(backends):
    said = refusal(backends["llguidance"], {"$ref": "#/parts/one", "parts": {"one": {"minimum": 1e30}}})
    assert "minimum beyond 2**53" in said
