"""Parameters that a model writes without quotes, as JSON."""

import json
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mllm_compile.text.calls.values import as_json, python_as_json


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("12", {"type": "string"}, '"12"'),
        (" a\n", {"type": "string"}, '" a\\n"'),
        ("null", {"type": "string"}, '"null"'),
        ("12", {"type": "integer"}, "12"),
        ("1.0", {"type": "integer"}, '"1.0"'),
        ("12", {"type": "number"}, "12"),
        ("1e5", {"type": "number"}, "1e5"),
        (".5", {"type": "number"}, '".5"'),
        ("NaN", {"type": "number"}, '"NaN"'),
        ("True", {"type": "boolean"}, "true"),
        ("false", {"type": "boolean"}, "false"),
        ("yes", {"type": "boolean"}, '"yes"'),
        ("None", {"type": ["integer", "null"]}, "null"),
        ("null", {"type": ["string", "null"]}, "null"),
        ("nul", {"type": ["string", "null"]}, '"nul"'),
        ('{ "a":1.10 }', {"type": "object"}, '{ "a":1.10 }'),
        ("{'a': True}", {"type": "object"}, '{"a": true}'),
        ("[1, 'b', None]", {"type": "array"}, '[1, "b", null]'),
        (r"['\ud800', '\ud83d\ude00']", {"type": "array"}, '["\ufffd", "\U0001f600"]'),
        ("[1,", {"type": "array"}, '"[1,"'),
        ('{"a": NaN}', {"type": "object"}, '"{\\"a\\": NaN}"'),
        ("{'a': set()}", {"type": "object"}, "\"{'a': set()}\""),
        ("7", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7"),
        ("7", {"$ref": "#/$defs/n"}, "7"),
        ("7", {"$ref": "#/$defs/loop"}, "7"),
        ("red", {"enum": ["red", 1]}, '"red"'),
        ("1", {"enum": ["red", 1]}, "1"),
        ("7", None, "7"),
        ("x y", None, '"x y"'),
        ("'x'", None, "\"'x'\""),
        ("[1]", {}, "[1]"),
    ],
)
def test_a_parameter_becomes_what_its_schema_allows(text, schema, expected):
    root = {"$defs": {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert as_json(text, schema, root) == expected


@given(st.text(), st.sampled_from([{"type": "string"}, {"type": "integer"}, {"type": "object"}, {}, None, {"type": 3}]))
def test_any_text_becomes_json(text, schema):
    value = json.loads(as_json(text, schema, {}))
    if schema == {"type": "string"}:
        assert value == text


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)))
def test_literals_of_python_keep_their_value(value):
    assert json.loads(python_as_json(repr(value))) == value


@pytest.mark.parametrize(
    "text", ["[" * 10_000, "(" * 200_000, "9" * 10_000, "-" * 5_000 + "1", "'\\d'", "__import__('os')"]
)
def test_what_python_cannot_read_is_a_string(text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value = json.loads(python_as_json(text), parse_int=str)
    assert value in (text, "\\d")
