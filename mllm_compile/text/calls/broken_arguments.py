"""Arguments of a call that are no JSON object, as a model has written them: what a template that takes an object gets.

A server gives out what its model wrote, also where the answer broke off in the middle, and clients give that back as
history. A turn is not refused for it.
"""

from __future__ import annotations

import json
import re
from typing import Any

# The name of a text that is no object, and cannot be completed to one; Anthropic's documentation advises it.
INVALID_JSON = "INVALID_JSON"

_MARK = re.compile(r'["{}\[\],]')
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?$")
_CLOSING = {"{": "}", "[": "]"}
_MOST_OPEN = 100  # objects and lists in each other


def object_of(text: str) -> dict[str, Any]:
    """The object of a call's arguments: as it is, completed where it broke off, or with the whole text as a member."""
    value = _parsed(text)
    if not isinstance(value, dict):
        value = _completed(text)
    return value if isinstance(value, dict) else {INVALID_JSON: text}


def _parsed(text: str) -> Any:
    """The value of a JSON text; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _without_open_escape(text: str) -> str:
    escape = _ESCAPE.search(text, len(text) - 5)
    if escape is None:
        return text
    before = text[: escape.start() + 1]
    is_open = (len(before) - len(before.rstrip("\\"))) % 2 == 1
    return text[: escape.start()] if is_open else text


def _completed(text: str) -> Any:
    """The object that a text begins, with all members that are whole, and the one that broke off if it has a value."""
    if not text.lstrip().startswith("{"):
        return None
    opened: list[str] = []
    whole, depth, at = 0, 0, 0  # where the last whole member ends, and how many are open there
    while found := _MARK.search(text, at):
        at = found.end()
        mark = found[0]
        if mark == '"':
            string = _STRING.match(text, found.start())
            if string is None:
                text = _without_open_escape(text) + '"'
                break
            at = string.end()
        elif mark in _CLOSING:
            opened.append(_CLOSING[mark])
            whole, depth = at, len(opened)
        elif mark == ",":
            whole, depth = found.start(), len(opened)
        elif opened and opened.pop() == mark:
            whole, depth = at, len(opened)
        else:
            return None
        if len(opened) > _MOST_OPEN:
            return None
    value = _parsed(text + "".join(reversed(opened)))
    return _parsed(text[:whole] + "".join(reversed(opened[:depth]))) if value is None else value
