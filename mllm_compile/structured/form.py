"""A form of an answer as backends take it: one kind, its text, and options that have become part of the text.

It is sent to the process that tries it (grammar_process.py), so it is plain data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams

# Where a keyword of JSON Schema holds further schemas.
_ONE = ("items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else", "additionalItems")
_ONE_MORE = ("unevaluatedItems", "unevaluatedProperties")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


class Refused(Exception):
    """The reason why a backend does not take a form, in words for the caller."""


@dataclass(frozen=True)
class Form:
    """
    Attributes:
        kind: json, regex, choice, grammar or structural_tag.
        text: a JSON schema, regular expression, JSON list of texts, grammar, or structural tag as JSON.
        is_compact: JSON without whitespace.
        whitespace: a regular expression for JSON's whitespace; None: the backend's own, bounded.
    """

    kind: str
    text: str
    is_compact: bool = False
    whitespace: str | None = None

    @classmethod
    def of(cls, params: StructuredOutputsParams) -> Form:
        """The form that a request asks for."""
        kind, text = params.kind, params.text
        if kind == "json_object":
            kind, text = "json", '{"type":"object"}'
        if params.disable_additional_properties:
            schema = json.loads(text)
            for part in subschemas(schema):
                if "additionalProperties" not in part and ("properties" in part or "patternProperties" in part):
                    part["additionalProperties"] = False
            text = json.dumps(schema, separators=(",", ":"))
        return cls(kind, text, params.disable_any_whitespace, params.whitespace_pattern)


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all schemas in it, wherever keywords have them; without recursion."""
    left = [schema]
    while left:
        part = left.pop()
        if not isinstance(part, dict):
            continue
        yield part
        left += [part[key] for key in (*_ONE, *_ONE_MORE) if key in part]
        left += [child for key in _LISTS if isinstance(part.get(key), list) for child in part[key]]
        left += [child for key in _MAPS if isinstance(part.get(key), dict) for child in part[key].values()]
