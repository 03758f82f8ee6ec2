"""Reads the calls of a section of text, by their syntax: objects, names and JSON, names and parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from mllm_compile.text.calls.json_reader import (
    accept_character,
    decoded,
    expect_character,
    nothing,
    read_string,
    read_value,
)
from mllm_compile.text.calls.output import Output
from mllm_compile.text.calls.source import Marks, NoCallError, Reader, Source
from mllm_compile.text.calls.syntax import NO, SPACE, CallSyntax, JsonObject, Literal, NameThenJson, Parameters
from mllm_compile.text.calls.tools import Tool
from mllm_compile.text.calls.values import as_json, property_schema, python_as_json

_MOST_NAME = 256  # characters of a name, an id or a parameter's key
_NAME = re.compile(r"[^\s<>{}\[\]()\"'`,;|=]*")
_KEY = re.compile(r"[^<>\"\n]*")  # between tags there may be more
_NAMED_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?")
_PYTHON_STOP = re.compile(r"[\"'{}\[\](),]")


def _unquoted(text: str) -> str:
    """Arguments that a model wrote as a string which holds JSON, as OpenAI's interface has them."""
    try:
        return decoded(text)
    except NoCallError:
        return text


class SectionReader:
    """Reads calls of one syntax.

    Args:
        source: the text.
        output: gets the calls, and other text as content.
        syntax: of the calls.
        tools: what may be called, by name.
    """

    def __init__(self, source: Source, output: Output, syntax: CallSyntax, tools: Mapping[str, Tool]) -> None:
        self._source = source
        self._output = output
        self._syntax = syntax
        self._tools = tools

    def read_section(self, lead: Literal, mark: str) -> Reader[None]:
        """Reads calls, with one of `also_begin` ahead or nothing; other text, marks included, becomes content."""
        source = self._source
        end, separator = Literal(self._syntax.end), Literal(self._syntax.separator)
        goes_on = bool(self._syntax.begin) or not self._syntax.is_marked  # else the next call has a mark of its own
        source.hold()
        try:
            yield from source.expect(lead)
            yield from source.expect(Literal(self._syntax.begin))
            while True:
                yield from self._read_call()
                if self._output.is_done:
                    return
                source.hold()
                if end and (yield from source.accept(end)):
                    break
                if not ((yield from source.accept(separator)) if separator else goes_on):
                    break
                if not (yield from source.peek()):
                    break
        except NoCallError:
            if self._output.is_open:
                self._output.end_call(is_whole=False)
                for literal in (Literal(self._syntax.call_end), end):
                    if literal:
                        yield from source.accept(literal)
                source.let_go()
            else:
                self._output.content(source.let_go() or source.take_to(source.at + len(mark)))
        else:
            source.let_go()

    def _read_call(self) -> Reader[None]:
        """
        Raises:
            NoCallError: this is no call; or it has begun, and breaks off.
        """
        yield from self._source.expect(Literal(self._syntax.call_begin))
        if isinstance(self._syntax.body, JsonObject):
            yield from self._read_object(self._syntax.body)
        elif isinstance(self._syntax.body, NameThenJson):
            yield from self._read_name_then_json(self._syntax.body)
        else:
            yield from self._read_parameters(self._syntax.body)
        end = Literal(self._syntax.call_end)
        if end:
            yield from self._source.accept(end)
        self._output.end_call(is_whole=True)

    def _start(self, name: str | None, call_id: str | None) -> None:
        """
        Raises:
            NoCallError: there is no name, or one that is no tool's where nothing else tells a call.
        """
        if not name or not (self._syntax.is_marked or name in self._tools):
            raise NoCallError
        self._source.let_go()
        self._output.start_call(name, call_id)

    def _stop(self) -> str:
        """A character that ends arguments whatever is open in them: no JSON has it outside of strings."""
        return "<" if (self._syntax.call_end or self._syntax.end).lstrip().startswith("<") else ""

    def _read_object(self, body: JsonObject) -> Reader[None]:
        found: dict[tuple[str, ...], str] = {}
        yield from self._read_members(body, (), found)
        if not self._output.is_open:
            arguments = found.get(body.arguments)
            if arguments is None and not self._syntax.is_marked:
                raise NoCallError
            self._start(found.get(body.name), found.get(body.id or ()))
            self._output.arguments(arguments or "{}")

    def _read_members(self, body: JsonObject, path: tuple[str, ...], found: dict[tuple[str, ...], str]) -> Reader[None]:
        """Reads an object on the way to the keys of `body`; a call starts when its arguments come."""
        source = self._source
        yield from expect_character(source, "{")
        if (yield from accept_character(source, "}")):
            return
        while True:
            yield from source.skip_space()
            here = (*path, (yield from read_string(source)))
            yield from expect_character(source, ":")
            yield from source.skip_space()
            if here in (body.name, body.id) and (yield from source.peek()) == '"':
                found[here] = yield from read_string(source)
            elif here == body.arguments and not self._output.is_open:
                if body.name in found:
                    self._start(found[body.name], found.get(body.id or ()))
                parts: list[str] = []
                is_text = (yield from source.peek()) == '"'
                is_streamed = self._output.is_open and not is_text
                out = self._output.arguments if is_streamed else parts.append
                if not (yield from read_value(source, out, self._stop())):
                    self._output.arguments("".join(parts) if self._output.is_open else "")
                    raise NoCallError
                arguments = "".join(parts)
                found[here] = _unquoted(arguments) if is_text else arguments
                if self._output.is_open and not is_streamed:
                    self._output.arguments(found[here])
            elif (
                any(key and key[: len(here)] == here for key in (body.name, body.arguments, body.id))
                and (yield from source.peek()) == "{"
            ):
                yield from self._read_members(body, here, found)
            elif not (yield from read_value(source, nothing, self._stop())):
                raise NoCallError
            if (yield from accept_character(source, ",")):
                continue
            yield from expect_character(source, "}")
            return

    def _read_name_then_json(self, body: NameThenJson) -> Reader[None]:
        source = self._source
        yield from source.skip_space()
        call_id = None
        if body.after_id is not None:
            call_id = yield from source.while_in(_NAME, _MOST_NAME)
            yield from source.expect(Literal(body.after_id))
            yield from source.skip_space()
        name = yield from source.while_in(_NAME, _MOST_NAME)
        if body.name_in_id:
            named = _NAMED_ID.fullmatch(name)
            name, call_id = (named["name"], name) if named else ("", None)
        elif body.before_id is not None and (yield from source.accept(Literal(body.before_id))):
            yield from source.skip_space()
            call_id = yield from source.while_in(_NAME, _MOST_NAME)
        yield from source.expect(Literal(body.between))
        self._start(name, call_id)
        yield from source.skip_space()
        end = Literal(self._syntax.call_end or self._syntax.end)
        following = yield from source.peek()
        if not following or (following not in "{[" and end and (yield from source.end_of(end)) != NO):
            self._output.arguments("{}")
        elif not (yield from read_value(source, self._output.arguments, self._stop())):
            raise NoCallError

    def _read_parameters(self, body: Parameters) -> Reader[None]:
        source = self._source
        yield from source.skip_space()
        name = yield from source.while_in(_NAME, _MOST_NAME)
        yield from source.expect(Literal(body.after_name))
        self._start(name, None)
        tool = self._tools.get(name)
        schema: Mapping[str, Any] = tool.parameters if tool else {}
        begin, separator = Literal(body.begin), Literal(body.separator)
        end = Literal(self._syntax.call_end or self._syntax.end)
        self._output.arguments("{")
        is_first = True
        while (yield from source.end_of(end)) == NO if end else bool((yield from source.peek())):
            if separator and not is_first:
                yield from source.accept(separator)
            if not (yield from source.accept(begin)):
                break
            key, value = yield from self._read_parameter(body, schema)
            self._output.arguments(f"{'' if is_first else ', '}{json.dumps(key, ensure_ascii=False)}: {value}")
            is_first = False
        self._output.arguments("}")
        if end and (yield from source.end_of(end)) == NO:
            raise NoCallError

    def _read_parameter(self, body: Parameters, schema: Mapping[str, Any]) -> Reader[tuple[str, str]]:
        """The key and the value, as JSON, of the parameter that is next.

        Raises:
            NoCallError: it breaks off.
        """
        source = self._source
        yield from source.skip_space()
        key = yield from source.while_in(_NAME if body.are_python else _KEY, _MOST_NAME)
        if not key:
            raise NoCallError
        between = body.between.rstrip(SPACE)
        space = body.between[len(between) :]
        is_json = False
        if not (yield from source.accept(Literal(between))):
            if body.between_json is None:
                raise NoCallError
            yield from source.expect(Literal(body.between_json))
            is_json = True
        if body.are_python:
            return key, python_as_json((yield from self._read_python()))
        if space:
            yield from source.accept_exactly(space)
        parts: list[str] = []
        end = Literal(body.end)
        if not (yield from source.until(Marks([end.first]), parts.append)):
            raise NoCallError
        yield from source.expect(end)
        text = "".join(parts).removesuffix(body.end[: len(body.end) - len(body.end.lstrip(SPACE))])
        if body.between_json is not None:
            return key, as_json(text, {} if is_json else {"type": "string"}, {})
        return key, as_json(text, property_schema(schema, key), schema)

    def _read_python(self) -> Reader[str]:
        """The text of a literal of Python, up to the comma or bracket behind it.

        Raises:
            NoCallError: it breaks off.
        """
        source = self._source
        parts: list[str] = []
        depth = 0
        while True:
            found = _PYTHON_STOP.search(source.text, source.at)
            parts.append(source.take_to(found.start() if found else len(source.text)))
            if found is None:
                if source.is_ended:
                    raise NoCallError
                yield
            elif found[0] in "\"'":
                yield from self._read_python_string(found[0], parts)
            else:
                if depth == 0 and found[0] in ",)]}":
                    return "".join(parts)
                depth += found[0] in "([{"
                depth -= found[0] in ")]}"
                parts.append(source.take_to(source.at + 1))

    def _read_python_string(self, quote: str, parts: list[str]) -> Reader[None]:
        source = self._source
        parts.append(source.take_to(source.at + 1))
        while (character := (yield from source.peek())) != quote:
            if not character:
                raise NoCallError
            parts.append(source.take_to(source.at + 1))
            if character == "\\" and (yield from source.peek()):
                parts.append(source.take_to(source.at + 1))
        parts.append(source.take_to(source.at + 1))
