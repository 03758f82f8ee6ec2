"""A form of an answer as backends take it: one kind, its text, and options that have become part of the text.

It is sent to the process that tries it (grammar_process.py), so it is plain data.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams
from mllm_compile.structured.json_schema import without_additional_properties


class Refused(Exception):
    """The reason why a backend does not take a form, in words for the caller."""


@dataclass(frozen=True)
class Form:
    """
    Attributes:
        kind: json, regex, choice, grammar, structural_tag or timestamps.
        text: a JSON schema, regular expression, JSON list of texts, grammar, structural tag as JSON, or token id.
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
            text = without_additional_properties(text)
        return cls(kind, text, params.disable_any_whitespace, params.whitespace_pattern)


def todays_tag(text: str) -> dict[str, Any]:
    """A structural tag; vLLM's older shape, `structures` and `triggers`, becomes today's.

    Raises:
        Refused: it is of neither shape.
    """
    tag = json.loads(text)
    if "structures" not in tag:
        if not isinstance(tag.get("format"), dict):
            raise Refused("structural_tag: expected a format, which is an object")
        return dict(tag)
    try:
        tags = [
            {
                "type": "tag",
                "begin": one["begin"],
                "content": {"type": "json_schema", "json_schema": one["schema"]},
                "end": one["end"],
            }
            for one in tag["structures"]
        ]
        form = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
    except (KeyError, TypeError) as error:
        raise Refused(
            f"structural_tag: expected triggers, and structures of begin, schema and end; {error} is missing"
        ) from None
    return {"type": "structural_tag", "format": form}
