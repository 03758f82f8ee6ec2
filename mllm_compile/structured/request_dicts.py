"""The form of an answer as JSON requests ask for it: OpenAI's `response_format`, vLLM's fields, old and new.

Plain Python, for servers: no torch, no backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from mllm_compile.errors import RequestError
from mllm_compile.runtime.sampling.param_checks import refused
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams

_TYPES = ("text", "json_object", "json_schema", "structural_tag")
_SCHEMA_KEYS = {"type", "name", "description", "schema", "strict"}
_SCHEMA_HINT = "Write {'type': 'json_schema', 'json_schema': {'name': …, 'schema': {…}}}."
# vLLM's names from before `structured_outputs`, and SGLang's.
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
    "structural_tag": "structural_tag",
    "regex": "regex",
    "ebnf": "grammar",
    "json_schema": "json",
}
FIELDS = ("response_format", "structured_outputs", *_GUIDED)


def structured_outputs_of(body: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """The form that a request's body asks for, None where it asks for none.

    Args:
        body: the request; only the keys in FIELDS are looked at, and those that are null count as missing.

    Raises:
        RequestError: it asks for several, or for one that is not what is expected.
    """
    guided = {_GUIDED[key]: body[key] for key in _GUIDED if body.get(key) is not None}
    if guided.get("json_object") is False:
        del guided["json_object"]
    found = {
        "response_format": of_response_format(body.get("response_format")),
        "structured_outputs": _of_structured_outputs(body.get("structured_outputs")),
        " and ".join(key for key in _GUIDED if body.get(key) is not None): (
            StructuredOutputsParams(**guided) if guided else None
        ),
    }
    asked = {name: params for name, params in found.items() if params is not None}
    if len(asked) > 1:
        raise RequestError(f"expected one form of the answer, got {' and '.join(asked)}. Leave one of them.")
    return next(iter(asked.values()), None)


def of_response_format(value: Any) -> StructuredOutputsParams | None:
    """The form of OpenAI's `response_format`, or of `text.format` of its Responses; None for text.

    Raises:
        RequestError: it is neither, or its schema is no object.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping) or value.get("type") not in _TYPES:
        raise refused("response_format", f"an object whose type is one of {', '.join(_TYPES)}", value)
    if value["type"] == "structural_tag":
        return StructuredOutputsParams(structural_tag=value)
    given = {key: one for key, one in value.items() if one is not None}
    if value["type"] != "json_schema":
        _check_keys("response_format", given, {"type"})
        return StructuredOutputsParams(json_object=True) if value["type"] == "json_object" else None
    inner = given.get("json_schema", given)
    if inner is not given:
        _check_keys("response_format", given, {"type", "json_schema"})
    if not isinstance(inner, Mapping) or not isinstance(inner.get("schema"), Mapping):
        raise refused("response_format.json_schema", "an object with a schema", inner, _SCHEMA_HINT)
    _check_keys("response_format.json_schema", inner, _SCHEMA_KEYS)
    return StructuredOutputsParams(json=inner["schema"])


def _check_keys(field: str, value: Mapping[Any, Any], known: Set[str]) -> None:
    unknown = sorted(set(map(str, value)) - known)
    if unknown:
        hint = _SCHEMA_HINT if "schema" in unknown else ""
        raise refused(field, f"no keys but {', '.join(sorted(known))}", unknown[0], hint)


def _of_structured_outputs(value: Any) -> StructuredOutputsParams | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise refused("structured_outputs", "an object", value)
    return StructuredOutputsParams(**value)
