"""StructuredOutputsParams: the form that an answer must have, under vLLM's names, checked when it is made.

Pure Python. A backend compiles it (mllm_compile/structured/); whether a schema, regex or grammar is a good one is found
out there. Its size is bounded here.
"""

from __future__ import annotations

import hashlib
import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.sampling.param_checks import by_name_alone, refused

MAX_STRUCTURE_CHARACTERS = 1 << 18  # of a schema, regex, grammar, or all choices: a compile's work grows with them
MAX_WHITESPACE_PATTERN = 1024
MAX_JSON_DEPTH = 100  # what backends read

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag", "timestamps")
_OF_JSON = ("json", "json_object")
_ELSEWHERE = {
    "json_schema": "Did you mean json?",
    "schema": "Did you mean json?",
    "backend": "Set structured_outputs: {backend: …} in the engine's config.",
    "disable_fallback": "Set structured_outputs: {backend: …} in the engine's config: a named backend has no fallback.",
}


@by_name_alone("json={…}", _ELSEWHERE)
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form of an answer: exactly one of json, regex, choice, grammar, json_object, structural_tag and timestamps.
    Immutable.

    Attributes:
        json: A JSON schema, as a dict or text.
        regex: A regular expression that the whole answer matches.
        choice: Texts; the answer is one of them.
        grammar: A context-free grammar in GBNF (from `root`) or Lark (from `start`).
        json_object: True: a JSON object, whatever is in it.
        structural_tag: XGrammar's structural tag, or vLLM's older `structures` and `triggers`, as a dict or text.
        timestamps: The id of <|notimestamps|>: text between times, as Whisper writes it.
        disable_any_whitespace: With json and json_object: no whitespace between the parts.
        disable_additional_properties: With json: only listed properties, in objects that do not say otherwise.
        whitespace_pattern: With json and json_object: a regular expression for what may be between the parts.

    Raises:
        RequestError: A value of the wrong type or size, none or several of the seven, or an option of another one.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    timestamps: int | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs: expected exactly one of {', '.join(_KINDS)}, got {' and '.join(given) or 'none'}."
            )
        for field in ("json", "structural_tag"):
            if getattr(self, field) is not None:
                object.__setattr__(self, field, _json_text(field, getattr(self, field)))
        for field in ("regex", "grammar"):
            if getattr(self, field) is not None:
                _check_text(field, getattr(self, field), MAX_STRUCTURE_CHARACTERS)
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.json_object is not None and self.json_object is not True:
            raise refused("json_object", "True or None", self.json_object)
        if self.timestamps is not None and (isinstance(self.timestamps, bool) or not isinstance(self.timestamps, int)):
            raise refused("timestamps", "a token id", self.timestamps)
        self._check_options()

    def _check_options(self) -> None:
        for field in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, field), bool):
                raise refused(field, "True or False", getattr(self, field))
        if self.whitespace_pattern is not None:
            _check_text("whitespace_pattern", self.whitespace_pattern, MAX_WHITESPACE_PATTERN)
            if self.disable_any_whitespace:
                raise refused("whitespace_pattern", "None beside disable_any_whitespace", self.whitespace_pattern)
        takers = {
            "disable_any_whitespace": _OF_JSON,
            "whitespace_pattern": _OF_JSON,
            "disable_additional_properties": ("json",),
        }
        for field, kinds in takers.items():
            if getattr(self, field) and self.kind not in kinds:
                expected = f"a form of {' or '.join(kinds)} beside it"
                raise refused(field, expected, self.kind, f"{self.kind} has no such option.")

    @property
    def kind(self) -> str:
        """The one of the seven that is given."""
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)

    @property
    def text(self) -> str:
        """The value that is given, as text; choices as a JSON list."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json_module.dumps(value)

    @property
    def options(self) -> tuple[bool, bool, str | None]:
        """disable_any_whitespace, disable_additional_properties, whitespace_pattern."""
        return self.disable_any_whitespace, self.disable_additional_properties, self.whitespace_pattern

    @cached_property
    def key(self) -> bytes:
        """A hash of all of it: two that are alike have one compiled grammar."""
        return hashlib.sha256(json_module.dumps([self.kind, self.text, *self.options]).encode()).digest()


def _check_text(field: str, value: object, most: int) -> None:
    if not isinstance(value, str) or not value:
        raise refused(field, "a text that is not empty", value)
    if len(value) > most:
        raise refused(field, f"at most {most} characters", len(value))
    try:
        value.encode()
    except UnicodeEncodeError:
        raise refused(field, "valid Unicode text", value) from None


def _choices(value: object) -> tuple[str, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence) or not value:
        raise refused("choice", "a list of texts", value)
    for text in value:
        _check_text("choice", text, MAX_STRUCTURE_CHARACTERS)
    num_characters = sum(map(len, value))
    if num_characters > MAX_STRUCTURE_CHARACTERS:
        raise refused("choice", f"at most {MAX_STRUCTURE_CHARACTERS} characters together", num_characters)
    return tuple(dict.fromkeys(value))


def _json_text(field: str, value: object) -> str:
    """`value`, an object or its JSON text, as compact JSON text; keys keep their order, which answers follow."""
    expected = "a JSON object, as a dict or as text"
    if isinstance(value, str):
        _check_text(field, value, MAX_STRUCTURE_CHARACTERS)
        try:
            value = json_module.loads(value)
        except (ValueError, RecursionError) as error:
            raise refused(field, expected, value, f"It cannot be read: {_reason(error)}.") from None
    if not isinstance(value, Mapping):
        raise refused(field, expected, value)
    try:
        text = json_module.dumps(dict(value), separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{field}: expected plain JSON data, got some that is none: {_reason(error)}.") from None
    if len(text) > MAX_STRUCTURE_CHARACTERS:
        raise refused(field, f"at most {MAX_STRUCTURE_CHARACTERS} characters of JSON", len(text))
    if _depth(value) > MAX_JSON_DEPTH:
        raise refused(field, f"at most {MAX_JSON_DEPTH} levels of nesting", "more", "Give parts names in $defs.")
    return text


def _reason(error: Exception) -> str:
    return "nested too deep" if isinstance(error, RecursionError) else str(error)


def _depth(value: object) -> int:
    """Levels of nesting, counted no further than one too many, and without recursion."""
    level: list[Any] = [value]
    for depth in range(MAX_JSON_DEPTH + 1):
        level = [one for one in level if isinstance(one, (Mapping, list, tuple))]
        if not level:
            return depth
        level = [child for one in level for child in (one.values() if isinstance(one, Mapping) else one)]
    return MAX_JSON_DEPTH + 1
