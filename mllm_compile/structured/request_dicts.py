"""The form of an answer as JSON requests ask for it: OpenAI's `response_format`, vLLM's fields, old and new.

Plain Python, for servers: no torch, no backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mllm_compile.errors import RequestError
from mllm_compile.runtime.sampling.param_checks import refused
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams

_TYPES = ("text", "json_object", "json_schema", "structural_tag")
_SCHEMA_KEYS = {"type", "name", "description", "schema", "strict"}
# vLLM's names from before `structured_outputs`.
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
    "structural_tag": "structural_tag",
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
    kind = value["type"]
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=value)
    inner = value.get("json_schema", value)
    if not isinstance(inner, Mapping) or not isinstance(inner.get("schema"), Mapping):
        hint = "Write {'type': 'json_schema', 'json_schema': {'name': …, 'schema': {…}}}."
        raise refused("response_format.json_schema", "an object with a schema", inner, hint)
    unknown = sorted(set(map(str, inner)) - _SCHEMA_KEYS)
    if unknown:
        raise refused("response_format.json_schema", f"the keys {', '.join(sorted(_SCHEMA_KEYS))}", unknown[0])
    return StructuredOutputsParams(json=inner["schema"])


def _of_structured_outputs(value: Any) -> StructuredOutputsParams | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise refused("structured_outputs", "an object", value)
    return StructuredOutputsParams(**value)
