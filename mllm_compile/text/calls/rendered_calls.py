"""Finds calls in a text that a template has rendered, and what is around their parts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mllm_compile.text.calls.syntax import JsonObject, NameThenJson, Parameters

_UNIT = re.compile(r"\s+|<[^<>\s]*>|\[/?[A-Z_]+\]|\w+|.", re.DOTALL)
_MOST_OBJECTS = 64  # that are tried in a text


class Wanted(NamedTuple):
    """A call that was rendered: its name, arguments of two texts, and the ids that it may have."""

    name: str
    arguments: Mapping[str, str]
    ids: tuple[str, ...]


class Split(NamedTuple):
    """Texts around calls, as CallSyntax has them."""

    begin: str
    call_begin: str
    call_end: str
    separator: str
    end: str


class FoundCall(NamedTuple):
    """One call in a rendered text: the syntax of its body, and where that is."""

    body: JsonObject | NameThenJson | Parameters
    begin: int
    end: int


def find_object(text: str, at: int, wanted: Wanted) -> FoundCall | None:
    """A call that is one JSON object."""
    name = text.find(wanted.name, at)
    if name < 0:
        return None
    for begin in _braces(text, at, name):
        value, end = _decoded(text, begin)
        names = _path(value, wanted.name)
        arguments = _path(value, wanted.arguments)
        if names and arguments:
            ids = [path for one in wanted.ids if (path := _path(value, one))]
            return FoundCall(JsonObject(names, arguments, ids[0] if ids else None), begin, end)
    return None


def find_json(text: str, at: int, wanted: Wanted) -> FoundCall | None:
    """A call that is a name and then JSON."""
    name = text.find(wanted.name, at)
    if name < 0:
        return None
    behind = name + len(wanted.name)
    for begin in _braces(text, behind, len(text)):
        value, end = _decoded(text, begin)
        if value == wanted.arguments:
            between = text[behind:begin]
            used = next((one for one in wanted.ids if one in between), None)
            if used is None:
                ahead = [(text.rfind(one, at, name), len(one)) for one in wanted.ids]
                id_at, length = max(ahead)
                if id_at < 0:
                    return FoundCall(NameThenJson(between), name, end)
                return FoundCall(NameThenJson(between, after_id=text[id_at + length : name]), id_at, end)
            before_id, _, between = between.partition(used)
            return FoundCall(NameThenJson(between, before_id), name, end)
    return None


def find_parameters(text: str, at: int, wanted: Wanted) -> FoundCall | None:
    """A call that is a name and then its parameters; their `begin`, `end` and `separator` are still together."""
    places = []
    parts = [wanted.name, *(part for pair in wanted.arguments.items() for part in pair)]
    for part in parts:
        begin = text.find(part, at)
        if begin < 0:
            return None
        at = begin + len(part)
        places.append((begin, at))
    name, key, value, next_key, next_value = places
    after_name, between = text[name[1] : key[0]], text[key[1] : value[0]]
    end = text[value[1] : next_key[0]]
    quote = between[-1:]
    if quote and quote in "\"'" and end.startswith(quote) and text.startswith(quote, next_value[1]):
        separator = end.removeprefix(quote)
        python = Parameters(after_name, "", between[:-1], "", separator, are_python=True)
        return FoundCall(python, name[0], next_value[1] + 1)
    return FoundCall(Parameters(after_name, "", between, end), name[0], next_value[1])


def _braces(text: str, at: int, end: int) -> Iterator[int]:
    for _ in range(_MOST_OBJECTS):
        at = text.find("{", at, end)
        if at < 0:
            return
        yield at
        at += 1


def _decoded(text: str, at: int) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


def _path(value: Any, wanted: Any) -> tuple[str, ...]:
    """The keys that lead to a value in objects; an object may be there as JSON text."""
    if not isinstance(value, dict):
        return ()
    for key, inner in value.items():
        if inner == wanted or (isinstance(wanted, dict) and isinstance(inner, str) and _decoded(inner, 0)[0] == wanted):
            return (key,)
        if found := _path(inner, wanted):
            return (key, *found)
    return ()


def with_end(body: Parameters, tail: str) -> tuple[Parameters, str]:
    """Parameters whose end is told apart from the separator: the former is behind the last one too."""
    if body.are_python:
        return body, ""
    end = common_start(body.end, tail)
    rest = body.end[len(end) :]
    begin = common_end(rest, body.after_name)
    separator, after_name = rest[: len(rest) - len(begin)], body.after_name[: len(body.after_name) - len(begin)]
    return replace(body, end=end, begin=begin, separator=separator, after_name=after_name), end


def split_around(ahead: str, between: str, behind: str) -> Split:
    """Texts around one call and around all, from the texts ahead of two calls, between and behind them."""
    call_end = common_start(between, behind)
    rest = between[len(call_end) :]
    call_begin = common_end(rest, ahead)
    separator = rest[: len(rest) - len(call_begin)]
    return Split(ahead[: len(ahead) - len(call_begin)], call_begin, call_end, separator, behind[len(call_end) :])


def units(text: str) -> list[str]:
    return _UNIT.findall(text)


def common(one: Sequence[str], other: Sequence[str]) -> int:
    """Characters of the units that both begin with."""
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += len(left)
    return length


def common_start(one: str, other: str) -> str:
    return one[: common(units(one), units(other))]


def common_end(one: str, other: str) -> str:
    length = common(units(one)[::-1], units(other)[::-1])
    return one[len(one) - length :]


FINDERS = (find_object, find_json, find_parameters)  # what fits further ahead is the narrower one
