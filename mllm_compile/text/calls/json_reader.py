"""Reads JSON that comes in pieces, as far as to see where a value ends: what it says is handed on as it was written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from mllm_compile.text.calls.source import NoCallError, Reader, Source
from mllm_compile.text.calls.syntax import SPACE
from mllm_compile.text.calls.values import of_whole_characters

_IN_STRING = re.compile(r'["\\]')
_SCALAR_END = re.compile(rf"[,\]}}<{SPACE}]")

Out = Callable[[str], object]


def nothing(text: str) -> None:
    """Takes text that nobody wants."""


def read_string(source: Source) -> Reader[str]:
    """The string that is next, decoded.

    Raises:
        NoCallError: no value begins there.
    """
    parts: list[str] = []
    if (yield from source.peek()) != '"' or not (yield from read_value(source, parts.append)):
        raise NoCallError
    return decoded("".join(parts))


def decoded(text: str) -> str:
    """
    Raises:
        NoCallError: it is not a string of JSON.
    """
    try:
        return of_whole_characters(str(json.loads(text, strict=False)))
    except ValueError:
        raise NoCallError from None


def expect_character(source: Source, character: str) -> Reader[None]:
    """
    Raises:
        NoCallError: another one is next, white space aside.
    """
    if not (yield from accept_character(source, character)):
        raise NoCallError


def accept_character(source: Source, character: str) -> Reader[bool]:
    """Reads white space, and the character if it is next."""
    yield from source.skip_space()
    if (yield from source.peek()) != character:
        return False
    source.take_to(source.at + 1)
    return True


def read_value(source: Source, out: Out, stop: str = "") -> Reader[bool]:
    """Hands on the value that is next, verbatim and as it comes; False if it is not whole.

    Args:
        source: white space ahead of the value is read, and not handed on.
        out: gets the text.
        stop: a character that no JSON has outside of strings, where the value ends however much is open.
    """
    yield from source.skip_space()
    first = yield from source.peek()
    if first == '"':
        out(source.take_to(source.at + 1))
        return (yield from _rest_of_string(source, out))
    if not first or first not in "{[":
        return (yield from _scalar(source, out))
    depth = 0
    pattern = re.compile(rf'["{{}}\[\]{re.escape(stop)}]')
    while True:
        found = pattern.search(source.text, source.at)
        end = found.start() if found else len(source.text)
        if found and found[0] != stop:
            end += 1
        if end > source.at:
            out(source.take_to(end))
        if found is None:
            if source.is_ended:
                return False
            yield
        elif found[0] == stop:
            return False
        elif found[0] == '"':
            if not (yield from _rest_of_string(source, out)):
                return False
        else:
            depth += 1 if found[0] in "{[" else -1
            if depth == 0:
                return True


def _rest_of_string(source: Source, out: Out) -> Reader[bool]:
    while True:
        found = _IN_STRING.search(source.text, source.at)
        if found is None or (found[0] == "\\" and found.end() == len(source.text)):
            end = len(source.text) if found is None or source.is_ended else found.start()
            if end > source.at:
                out(source.take_to(end))
            if source.is_ended:
                return False
            yield
        else:
            out(source.take_to(found.end() + (found[0] == "\\")))
            if found[0] == '"':
                return True


def _scalar(source: Source, out: Out) -> Reader[bool]:
    """A number or a name; also any other text."""
    num_read = 0
    while True:
        found = _SCALAR_END.search(source.text, source.at)
        end = found.start() if found else len(source.text)
        if end > source.at:
            num_read += end - source.at
            out(source.take_to(end))
        if found or source.is_ended:
            return num_read > 0 and found is not None
        yield
