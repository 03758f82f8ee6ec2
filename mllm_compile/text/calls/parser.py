"""Reads a model's text, as it comes in pieces, into events: content, reasoning, calls of tools.

One state machine for all syntaxes (syntax.py) but harmony's (harmony.py). Its events are the same however the text is
cut, once texts of one kind are joined. JSON arguments are passed on as they were written and never read again.

- White space between reasoning, answer and calls is dropped, as templates put it there again.
- A text that opens like a call and is none is content. So is what follows a call.
- A call that has begun stays one: if it breaks off, its arguments end where the text does, and may be no valid JSON.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mllm_compile.text.calls.events import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    ContentDelta,
    End,
    Event,
    ReasoningDelta,
)
from mllm_compile.text.calls.json_reader import (
    accept_character,
    decoded,
    expect_character,
    nothing,
    read_string,
    read_value,
)
from mllm_compile.text.calls.source import Marks, NoCallError, Reader, Source
from mllm_compile.text.calls.syntax import (
    NO,
    SPACE,
    CallSyntax,
    Channels,
    ChatSyntax,
    JsonObject,
    Literal,
    NameThenJson,
    Parameters,
    Reasoning,
)
from mllm_compile.text.calls.tools import Tool
from mllm_compile.text.calls.values import as_json, property_schema, python_as_json

_MOST_NAME = 256  # characters of a name, an id or a parameter's key
_NAME = re.compile(r"[^\s<>{}\[\]()\"'`,;|=]*")
_NAMED_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?")
_FUNCTION = re.compile(r"to=(?:functions\.)?(?P<name>[^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_PYTHON_STOP = re.compile(r"[\"'{}\[\](),]")

_SHORT_ID = string.ascii_letters + string.digits


def new_id(is_short: bool) -> str:
    """An id for a call that the model gave none."""
    if is_short:
        return "".join(secrets.choice(_SHORT_ID) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def _unquoted(text: str) -> str:
    """Arguments that a model wrote as a string which holds JSON, as OpenAI's interface has them."""
    try:
        return decoded(text)
    except NoCallError:
        return text


class CallParser:
    """Reads one answer.

    Args:
        syntax: the model's.
        tools: what the request offers; with none, or None, no calls are looked for.
        reasoning_is_open: the prompt's end has begun the reasoning (`Reasoning.is_opened_by`).
        is_parallel: there may be several calls; else the answer is over after the first (`is_done`).
        stripped: special tokens to take out of the text (`ChatSyntax.special_tokens`).
        make_id: gives ids to calls whose model gives none.
    """

    def __init__(
        self,
        syntax: ChatSyntax,
        tools: Sequence[Tool] | None,
        *,
        reasoning_is_open: bool = False,
        is_parallel: bool = True,
        stripped: frozenset[str] = frozenset(),
        make_id: Callable[[], str] | None = None,
    ) -> None:
        self._tools: Mapping[str, Tool] = {tool.name: tool for tool in tools or ()}
        self._make_id = make_id or (lambda: new_id(syntax.ids_are_short))
        self._is_parallel = is_parallel
        self._stripped = Marks(stripped)
        self._unstripped = Source()
        self._source = Source()
        self._events: list[Event] = []
        self._num_calls = 0
        self._is_open = False  # a call has started and not ended
        self._arguments: list[str] = []  # of that call, in this push
        self._space: list[str] = []  # at the end of the content so far; shown when more content follows
        self._drops_space = False  # ahead of content: it separates it from what was before
        self.is_done = False
        if isinstance(syntax.calls, Channels):
            self._reader = self._read_channels(syntax.calls)
        else:
            calls = syntax.calls if self._tools else None
            self._reader = self._read_answer(syntax.reasoning, calls, reasoning_is_open)
        self._resume()

    def push(self, text: str) -> list[Event]:
        """Adds text; returns what is certain now. What comes after `is_done` is dropped."""
        self._push(text, is_last=False)
        return self._taken()

    def finish(self, reason: str) -> list[Event]:
        """Ends the answer.

        Args:
            reason: why the model stopped: `length`, `stop`, or another one of the engine's.

        Returns:
            What was held back, and the End. Its reason is `tool_calls` if the model stopped with a call begun.
        """
        self._push("", is_last=True)
        self._events.append(End("tool_calls" if reason == "stop" and self._num_calls else reason))
        return self._taken()

    def _push(self, text: str, is_last: bool) -> None:
        strip = self._unstripped
        strip.push(text)
        strip.is_ended = is_last
        parts = []
        while True:
            end, mark = self._stripped.find(strip.text, strip.at, is_last)
            parts.append(strip.take_to(end))
            if not mark:
                break
            strip.take_to(end + len(mark))
        self._source.push("".join(parts))
        self._source.is_ended = is_last
        self._resume()

    def _resume(self) -> None:
        if not self.is_done:
            next(self._reader, None)
        if self.is_done:
            self._source.at = len(self._source.text)

    def _taken(self) -> list[Event]:
        self._show_arguments()
        events, self._events = self._events, []
        return events

    # --- content and reasoning ---

    def _read_answer(self, reasoning: Reasoning | None, calls: CallSyntax | None, is_open: bool) -> Reader[None]:
        if reasoning is not None:
            is_begun = yield from self._source.accept(Literal(reasoning.begin))
            if is_begun or is_open:
                yield from self._read_reasoning(reasoning)
        if calls is not None and not calls.is_marked:
            yield from self._read_section(calls, Literal(""), "")
        leads = {Literal(text).first: Literal(text) for text in (calls.also_begin if calls else ())}
        if calls is not None and calls.is_marked:
            leads[Literal(calls.opening).first] = Literal("")
        marks = Marks(leads)
        while not self.is_done and (mark := (yield from self._source.until(marks, self._content))):
            assert calls is not None, "there are marks"
            yield from self._read_section(calls, leads[mark], mark)
        self._content_ends()

    def _read_reasoning(self, reasoning: Reasoning) -> Reader[None]:
        yield from self._source.skip_space()
        space = ""

        def reason(text: str) -> None:
            nonlocal space
            shown = (space + text).rstrip(SPACE)
            space = (space + text)[len(shown) :]
            if shown:
                self._events.append(ReasoningDelta(shown))

        if (yield from self._source.until(Marks([reasoning.end]), reason)):
            self._source.take_to(self._source.at + len(reasoning.end))
            self._drops_space = True

    def _content(self, text: str) -> None:
        if self._drops_space:
            text = text.lstrip(SPACE)
            self._drops_space = not text
        shown = text.rstrip(SPACE)
        if shown:
            self._events.append(ContentDelta("".join([*self._space, shown])))
            self._space = []
        if len(shown) < len(text):
            self._space.append(text[len(shown) :])

    def _content_ends(self) -> None:
        if self._space:
            self._events.append(ContentDelta("".join(self._space)))
            self._space = []

    # --- calls ---

    def _read_section(self, syntax: CallSyntax, lead: Literal, mark: str) -> Reader[None]:
        """Reads calls, with one of `also_begin` ahead or nothing; what is none, its mark too, becomes content."""
        source = self._source
        end, separator = Literal(syntax.end), Literal(syntax.separator)
        goes_on = bool(syntax.begin) or not syntax.is_marked  # else the next call has a mark of its own
        source.hold()
        try:
            yield from source.expect(lead)
            yield from source.expect(Literal(syntax.begin))
            while True:
                yield from self._read_call(syntax)
                if self.is_done:
                    return
                source.hold()
                if end and (yield from source.accept(end)):
                    break
                if not ((yield from source.accept(separator)) if separator else goes_on):
                    break
                if not (yield from source.peek()):
                    break
        except NoCallError:
            if self._is_open:
                self._end_call(is_whole=False)
                for literal in (Literal(syntax.call_end), end):
                    if literal:
                        yield from source.accept(literal)
                source.let_go()
            else:
                self._content(source.let_go() or source.take_to(source.at + len(mark)))
        else:
            source.let_go()

    def _read_call(self, syntax: CallSyntax) -> Reader[None]:
        """
        Raises:
            NoCallError: this is none; or it has begun, and breaks off.
        """
        yield from self._source.expect(Literal(syntax.call_begin))
        if isinstance(syntax.body, JsonObject):
            yield from self._read_object(syntax, syntax.body)
        elif isinstance(syntax.body, NameThenJson):
            yield from self._read_name_then_json(syntax, syntax.body)
        else:
            yield from self._read_parameters(syntax, syntax.body)
        end = Literal(syntax.call_end)
        if end:
            yield from self._source.accept(end)
        self._end_call(is_whole=True)

    def _start(self, syntax: CallSyntax, name: str | None, call_id: str | None) -> None:
        """
        Raises:
            NoCallError: there is no name, or one that is no tool's where nothing else tells a call.
        """
        if not name or not (syntax.is_marked or name in self._tools):
            raise NoCallError
        self._source.let_go()
        self._start_call(name, call_id)

    def _start_call(self, name: str, call_id: str | None) -> None:
        self._space, self._drops_space, self._is_open = [], True, True
        self._events.append(CallStart(self._num_calls, call_id or self._make_id(), name))
        self._num_calls += 1

    def _add_arguments(self, text: str) -> None:
        self._arguments.append(text)

    def _show_arguments(self) -> None:
        if text := "".join(self._arguments):
            self._events.append(ArgumentsDelta(self._num_calls - 1, text))
        self._arguments = []

    def _end_call(self, is_whole: bool) -> None:
        self._show_arguments()
        self._events.append(CallEnd(self._num_calls - 1, is_whole))
        self._is_open = False
        self.is_done = not self._is_parallel

    def _stop(self, syntax: CallSyntax) -> str:
        """A character that ends arguments whatever is open in them: no JSON has it outside of strings."""
        return "<" if (syntax.call_end or syntax.end).lstrip().startswith("<") else ""

    def _read_object(self, syntax: CallSyntax, body: JsonObject) -> Reader[None]:
        found: dict[tuple[str, ...], str] = {}
        yield from self._read_members(syntax, body, (), found)
        if not self._is_open:
            arguments = found.get(body.arguments)
            if arguments is None and not syntax.is_marked:
                raise NoCallError
            self._start(syntax, found.get(body.name), found.get(body.id or ()))
            self._add_arguments(arguments or "{}")

    def _read_members(
        self, syntax: CallSyntax, body: JsonObject, path: tuple[str, ...], found: dict[tuple[str, ...], str]
    ) -> Reader[None]:
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
            elif here == body.arguments and not self._is_open:
                if body.name in found:
                    self._start(syntax, found[body.name], found.get(body.id or ()))
                parts: list[str] = []
                is_text = (yield from source.peek()) == '"'
                is_streamed = self._is_open and not is_text
                out = self._add_arguments if is_streamed else parts.append
                if not (yield from read_value(source, out, self._stop(syntax))):
                    self._add_arguments("".join(parts) if self._is_open else "")
                    raise NoCallError
                arguments = "".join(parts)
                found[here] = _unquoted(arguments) if is_text else arguments
                if self._is_open and not is_streamed:
                    self._add_arguments(found[here])
            elif (
                any(key and key[: len(here)] == here for key in (body.name, body.arguments, body.id))
                and (yield from source.peek()) == "{"
            ):
                yield from self._read_members(syntax, body, here, found)
            elif not (yield from read_value(source, nothing, self._stop(syntax))):
                raise NoCallError
            if (yield from accept_character(source, ",")):
                continue
            yield from expect_character(source, "}")
            return

    def _read_name_then_json(self, syntax: CallSyntax, body: NameThenJson) -> Reader[None]:
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
        self._start(syntax, name, call_id)
        yield from source.skip_space()
        end = Literal(syntax.call_end or syntax.end)
        following = yield from source.peek()
        if not following or (following not in "{[" and end and (yield from source.end_of(end)) != NO):
            self._add_arguments("{}")
        elif not (yield from read_value(source, self._add_arguments, self._stop(syntax))):
            raise NoCallError

    def _read_parameters(self, syntax: CallSyntax, body: Parameters) -> Reader[None]:
        source = self._source
        yield from source.skip_space()
        name = yield from source.while_in(_NAME, _MOST_NAME)
        yield from source.expect(Literal(body.after_name))
        self._start(syntax, name, None)
        tool = self._tools.get(name)
        schema: Mapping[str, Any] = tool.parameters if tool else {}
        begin, separator = Literal(body.begin), Literal(body.separator)
        end = Literal(syntax.call_end or syntax.end)
        self._add_arguments("{")
        is_first = True
        while (yield from source.end_of(end)) == NO if end else bool((yield from source.peek())):
            if separator and not is_first:
                yield from source.accept(separator)
            if not (yield from source.accept(begin)):
                break
            key, value = yield from self._read_parameter(body, schema)
            self._add_arguments(f"{'' if is_first else ', '}{json.dumps(key, ensure_ascii=False)}: {value}")
            is_first = False
        self._add_arguments("}")
        if end and (yield from source.end_of(end)) == NO:
            raise NoCallError

    def _read_parameter(self, body: Parameters, schema: Mapping[str, Any]) -> Reader[tuple[str, str]]:
        """The key and the value, as JSON, of the parameter that is next.

        Raises:
            NoCallError: it breaks off.
        """
        source = self._source
        yield from source.skip_space()
        key = yield from source.while_in(_NAME, _MOST_NAME)
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

    # --- harmony ---

    def _read_channels(self, syntax: Channels) -> Reader[None]:
        """Reads messages, each with a header; a text without one is content."""
        source = self._source
        header_marks = Marks([syntax.message])
        heads = Marks([syntax.start, syntax.channel])
        ends = Marks([syntax.end, syntax.call, syntax.stop, syntax.start, syntax.channel])
        yield from source.skip_space()  # the prompt has begun the first header
        header = ["to="] if (yield from source.accept_exactly("to=")) else []
        while not self.is_done:
            if not header and not (yield from source.until(heads, self._content)):
                break
            if not (yield from source.until(header_marks, header.append)):
                if len("".join(header)) > _MOST_NAME:
                    self._content("".join(header))
                break
            source.take_to(source.at + len(syntax.message))
            yield from self._read_message("".join(header), ends)
            mark = yield from source.until(ends, nothing)
            if mark in (syntax.end, syntax.call, syntax.stop):
                source.take_to(source.at + len(mark))
            header = []
        self._content_ends()

    def _read_message(self, header: str, ends: Marks) -> Reader[None]:
        source = self._source
        function, channel = _FUNCTION.search(header), _CHANNEL.search(header)
        if function and self._tools:
            self._start_call(function["name"], None)
            parts = 0

            def count(text: str) -> None:
                nonlocal parts
                parts += 1
                self._add_arguments(text)

            yield from source.skip_space()
            mark = yield from source.until(ends, count)
            if not parts:
                self._add_arguments("{}")
            self._end_call(is_whole=bool(mark))
        elif channel and channel[1] == "analysis":
            yield from source.until(ends, lambda text: self._events.append(ReasoningDelta(text)))
        else:
            yield from source.until(ends, self._content)
