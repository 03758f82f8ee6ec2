"""Structural tags as grammars in llguidance's dialect of Lark.

Regular parts (texts, regular expressions, any text up to a mark) are terminals, as long as possible. Its lexer takes
the longest match and never goes back. So optional white space and a text behind it that begins with white space have to
be one terminal. JSON and special tokens are between terminals, in rules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mllm_compile.structured.form import Refused

_TEXT, _SOME_TEXT = "/(?s:.*)/", "/(?s:.+)/"
_SERVED = (
    "const_string", "regex", "any_text", "json_schema", "token", "tag", "sequence", "or", "optional",
    "tags_with_separator", "triggered_tags", "token_triggered_tags",
)  # fmt: skip
_KNOWN = {
    "json_schema": {"json_schema"}, "any_text": {"excludes"}, "regex": {"pattern"}, "token": {"token"},
    "triggered_tags": {"triggers", "tags", "at_least_one", "stop_after_first"},
    "token_triggered_tags": {"trigger_tokens", "tags", "at_least_one", "stop_after_first"},
}  # fmt: skip

TagPart = Mapping[str, Any]


def lark_of_tag(form: TagPart, json_rule: Callable[[Any], str], regex_of: Callable[[str], str]) -> str:
    """The grammar of a structural tag's format.

    Args:
        json_rule: of a schema, what a rule says in its place.
        regex_of: of a regular expression, its text between slashes in Lark.

    Raises:
        Refused: the format has a kind, or an option, that is not served here.
    """
    writer = _Writer(json_rule, regex_of)
    try:
        start = writer.rule_of(tuple(_elements(form)), "")
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise Refused(f"the structural tag is not of the form that XGrammar's documentation has ({error!r})") from None
    return "\n".join([f"start: {start}", *writer.lines])


class _Writer:
    """Writes rules and terminals.

    A rule has elements in a row, and a prefix: a regular expression ahead of them that is not written yet, as the next
    element may continue it.

    Attributes:
        lines: of the grammar, without its first rule.
    """

    def __init__(self, json_rule: Callable[[Any], str], regex_of: Callable[[str], str]) -> None:
        self._json_rule, self._regex_of = json_rule, regex_of
        self._names: dict[tuple[str, str], str] = {}
        self.lines: list[str] = []

    def rule_of(self, elements: tuple[TagPart, ...], prefix: str) -> str:
        """The name of the rule of these elements behind the prefix."""
        while elements and (regular := self._regular_element(elements)) is not None:
            elements, prefix = elements[1:], f"{prefix} {regular}"
        return self._named("r", self._written(elements, prefix))

    def terminal(self, regular: str) -> str:
        """The name of a terminal, or none for an empty text."""
        return self._named("T", regular) if regular.strip() else ""

    def _named(self, kind: str, text: str) -> str:
        if (kind, text) not in self._names:
            self._names[kind, text] = f"{kind}{len(self._names)}"
            self.lines.append(f"{self._names[kind, text]}: {text}")
        return self._names[kind, text]

    def _written(self, elements: tuple[TagPart, ...], prefix: str) -> str:
        if not elements:
            return self.terminal(prefix) or _EMPTY
        part, rest = elements[0], elements[1:]
        kind = part["type"]
        if kind == "optional":
            chosen = self.rule_of((*_elements(part["content"]), *rest), prefix)
            return f"{chosen} | {self.rule_of(rest, prefix)}"
        if kind == "json_schema":
            written = f"{self.terminal(prefix)} {self._json_rule(part['json_schema'])}"
        elif kind == "token":
            written = f"{self.terminal(prefix)} {_token(part)}"
        elif kind == "or":
            written = f"({' | '.join(self._whole(one, prefix) for one in part['elements'])})"
        elif kind == "tags_with_separator":
            written = self._separated(part, prefix)
        else:
            written = self._triggered(part, prefix)
        return f"{written} {self.rule_of(rest, '')}" if rest else written

    def _whole(self, part: TagPart, prefix: str) -> str:
        return self.rule_of(tuple(_elements(part)), prefix)

    def _separated(self, part: TagPart, prefix: str) -> str:
        first = self._alternatives(part["tags"], prefix)
        if part.get("stop_after_first", False):
            rule = first
        else:
            rule = f"{first} ({self._alternatives(part['tags'], _literal(part['separator']))})*"
        return rule if part.get("at_least_one", False) else f"({rule} | {self.terminal(prefix) or _EMPTY})"

    def _alternatives(self, tags: list[TagPart], prefix: str) -> str:
        return f"({' | '.join(self._whole(tag, prefix) for tag in tags)})"

    def _triggered(self, part: TagPart, prefix: str) -> str:
        """Text with triggers only where they begin one of the tags."""
        if part["type"] == "token_triggered_tags":
            not_free, ahead = "", f"{prefix} {_TEXT}"
        else:
            triggers = part["triggers"]
            not_free, ahead = "".join(f" & ~{_holding(trigger)}" for trigger in triggers), prefix
            ahead += f" ({_TEXT}{not_free})"
            if any(not any(tag["begin"].startswith(one) for one in triggers) for tag in part["tags"]):
                raise Refused("a tag of triggered_tags begins with none of its triggers")
        tail = self.terminal(f"({_SOME_TEXT}{not_free})")
        first = self._alternatives(part["tags"], ahead)
        if part.get("stop_after_first", False):
            rule = first
        else:
            more = first if not prefix.strip() else self._alternatives(part["tags"], f" ({_TEXT}{not_free})")
            rule = f"{first} {more}* {tail}?"
        return rule if part.get("at_least_one", False) else f"({rule} | {self.terminal(prefix)} {tail}?)"

    def _regular_element(self, elements: tuple[TagPart, ...]) -> str | None:
        """The first element as an expression of a terminal, None if it is more than regular."""
        if elements[0]["type"] == "any_text":
            return _any_text(elements[0], elements[1] if len(elements) > 1 else None)
        return self._regular(elements[0])

    def _regular(self, part: TagPart) -> str | None:
        kind = part["type"]
        _check(part)
        if kind == "const_string":
            return _literal(part["value"])
        if kind == "regex":
            return f"/{self._regex_of(part['pattern'])}/"
        if kind == "optional":
            inner = self._regular_all(part["content"])
            return None if inner is None else f"({inner or _EMPTY})?"
        if kind == "or":
            each = [self._regular_all(one) for one in part["elements"]]
            return None if None in each else f"({' | '.join(one or _EMPTY for one in each if one is not None)})"
        return None

    def _regular_all(self, part: TagPart) -> str | None:
        elements, written = tuple(_elements(part)), []
        while elements:
            regular = self._regular_element(elements)
            if regular is None:
                return None
            written.append(regular)
            elements = elements[1:]
        return " ".join(written)


_EMPTY = '""'


def _check(part: TagPart) -> None:
    kind = part["type"]
    if kind not in _SERVED:
        raise Refused(f"llguidance takes no {kind} in a structural tag")
    options = set(part) - {"type"} - _KNOWN.get(kind, set(part))
    used = next((name for name in sorted(options) if part[name]), None)
    if used == "style" and part[used] == "json":
        return
    if used is not None:
        raise Refused(f"llguidance takes no {used} of {kind} in a structural tag")


def _elements(part: TagPart) -> list[TagPart]:
    """The elements of a sequence, flat; a tag's begin and end are elements too."""
    return [one for one in _flat(part) if one["type"] != "const_string" or one["value"]]


def _flat(part: TagPart) -> Iterator[TagPart]:
    if part["type"] == "sequence":
        for element in part["elements"]:
            yield from _flat(element)
    elif part["type"] == "tag":
        yield _mark(part["begin"])
        yield from _flat(part["content"])
        yield _mark(part["end"])
    else:
        yield part


def _mark(mark: Any) -> TagPart:
    if isinstance(mark, list):
        return {"type": "or", "elements": [_mark(one) for one in mark]}
    return {"type": "const_string", "value": mark} if isinstance(mark, str) else mark


def _any_text(part: TagPart, follower: TagPart | None) -> str:
    """Any text, which the mark behind it ends where it first comes."""
    _check(part)
    excluded = list(part.get("excludes", []))
    if follower is not None and follower["type"] == "const_string":
        excluded.append(follower["value"])
    elif follower is not None and follower["type"] != "token":
        raise Refused("llguidance takes no any_text that neither a text nor a token ends, in a structural tag")
    return f"({_TEXT}{''.join(f' & ~{_holding(text)}' for text in excluded)})"


def _holding(text: str) -> str:
    """A terminal's expression of all texts that hold this one."""
    return f"({_TEXT} {_literal(text)} {_TEXT})"


def _literal(text: str) -> str:
    return json.dumps(text).replace("\x7f", r"\u007f")


def _token(part: TagPart) -> str:
    token = part["token"]
    if not isinstance(token, int):
        raise Refused("llguidance takes tokens by their ids alone, in a structural tag")
    return f"<[{token}]>"
