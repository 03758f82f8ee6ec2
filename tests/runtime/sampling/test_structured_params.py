"""StructuredOutputsParams: exactly one form, its size and its options; SamplingParams with one."""

import dataclasses
import json

import pytest

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams

MANY = 1 << 18


def test_a_schema_is_kept_as_text_with_its_order_whatever_it_was_given_as():
    schema = {"type": "object", "properties": {"z": {}, "a": {}}}
    as_dict = StructuredOutputsParams(json=schema)
    as_text = StructuredOutputsParams(json=json.dumps(schema, indent=2))
    assert as_dict == as_text
    assert as_dict.json == '{"type":"object","properties":{"z":{},"a":{}}}'
    assert as_dict.key == as_text.key
    assert hash(as_dict) == hash(as_text)


def test_forms_with_other_options_have_other_keys():
    forms = [
        StructuredOutputsParams(json={}),
        StructuredOutputsParams(json={}, disable_any_whitespace=True),
        StructuredOutputsParams(json={}, disable_additional_properties=True),
        StructuredOutputsParams(json={}, whitespace_pattern=" "),
        StructuredOutputsParams(regex="{}"),
        StructuredOutputsParams(grammar="{}"),
    ]
    assert len({form.key for form in forms}) == len(forms)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {},
            r"expected exactly one of json, regex, choice, grammar, json_object, structural_tag, timestamps, got none",
        ),
        ({"json": {}, "regex": "a"}, r"expected exactly one of .*, got json and regex"),
        ({"json": "[]"}, r"json: expected a JSON object, as a dict or as text, got \[\]"),
        ({"json": "{"}, r"json: .* got '\{'\. It cannot be read: Expecting property name"),
        ({"json": '{"a":' * 50_000 + "1" + "}" * 50_000}, r"json: expected at most 262144 characters, got 300001"),
        ({"json": '{"a":' * 20_000 + "1" + "}" * 20_000}, r"json: .* It cannot be read: nested too deep"),
        ({"json": '{"a":' * 101 + "1" + "}" * 101}, r"json: expected at most 100 levels of nesting"),
        ({"json": '{"a": NaN}'}, r"json: expected plain JSON data, got some that is none: Out of range float"),
        ({"json": {"a": {1}}}, r"json: expected plain JSON data, got some that is none: .*set"),
        ({"json": {"enum": ["x" * 100] * 5000}}, r"json: expected at most 262144 characters of JSON, got \d+"),
        ({"json": 5}, r"json: expected a JSON object, as a dict or as text, got 5"),
        ({"regex": ""}, r"regex: expected a text that is not empty, got ''"),
        ({"regex": "a" * (MANY + 1)}, r"regex: expected at most 262144 characters, got 262145"),
        ({"regex": "\ud800"}, r"regex: expected valid Unicode text"),
        ({"regex": 5}, r"regex: expected a text"),
        ({"grammar": "a" * (MANY + 1)}, r"grammar: expected at most 262144 characters"),
        ({"choice": []}, r"choice: expected a list of texts, got \[\]"),
        ({"choice": "abc"}, r"choice: expected a list of texts, got 'abc'"),
        ({"choice": ["a", ""]}, r"choice: expected a text that is not empty, got ''"),
        ({"choice": ["a" * 1000] * 1000}, r"choice: expected at most 262144 characters together, got 1000000"),
        ({"json_object": False}, r"json_object: expected True or None, got False"),
        ({"regex": "a", "disable_any_whitespace": True}, r"disable_any_whitespace: .* got 'regex'"),
        ({"json_object": True, "disable_additional_properties": True}, r"disable_additional_properties: .*json_object"),
        ({"json": {}, "disable_any_whitespace": 1}, r"disable_any_whitespace: expected True or False, got 1"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, r"whitespace_pattern: expected None"),
        ({"json": {}, "whitespace_pattern": " " * 1025}, r"whitespace_pattern: expected at most 1024 characters"),
        ({"json_schema": {}}, r"json_schema is no field of StructuredOutputsParams\. Did you mean json\?"),
        ({"regexp": "a"}, r"regexp is no field of StructuredOutputsParams\. Did you mean regex\?"),
    ],
)
def test_a_form_that_is_wrong_is_refused_by_name(given, said):
    with pytest.raises(RequestError, match=said):
        StructuredOutputsParams(**given)


def test_a_positional_argument_is_refused_with_an_example():
    with pytest.raises(RequestError, match=r"StructuredOutputsParams: expected arguments by name, such as json="):
        StructuredOutputsParams({})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"structured_outputs": {"json": {}}}, r"structured_outputs: expected StructuredOutputsParams or None"),
        ({"ignore_eos": True}, r"ignore_eos: expected none beside structured_outputs, got True"),
        ({"allowed_token_ids": [1]}, r"allowed_token_ids: expected none beside structured_outputs"),
        ({"bad_words": ["a"]}, r"bad_words: expected none beside structured_outputs"),
    ],
)
def test_what_could_leave_no_token_is_refused_beside_a_form(given, said):
    with pytest.raises(RequestError, match=said):
        SamplingParams(**({"structured_outputs": StructuredOutputsParams(regex="a")} | given))


def test_parameters_with_a_form_can_be_replaced_and_copied_for_each_answer():
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), n=2, seed=5)
    assert params.of_answer(1).structured_outputs is params.structured_outputs
    assert dataclasses.replace(params, max_tokens=3).structured_outputs == params.structured_outputs
