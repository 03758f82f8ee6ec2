"""Reads a model's text, as it comes in pieces, into events: content, reasoning, calls of tools.

This module reads reasoning and content, section_reader.py calls, and channels.py whole answers in harmony; all write to
output.py. The events are the same however the text is cut, once texts of one kind are joined. JSON arguments are passed
on as they were written and never read again.

- White space between reasoning, answer and calls is dropped, as templates put it there again.
- A text that only opens like a call is content. So is what follows a call.
- A call that has begun stays one: if it breaks off, its arguments end where the text does, and may be no valid JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mllm_compile.text.calls.channels import read_channels
from mllm_compile.text.calls.events import End, Event
from mllm_compile.text.calls.output import Output, new_id
from mllm_compile.text.calls.section_reader import SectionReader
from mllm_compile.text.calls.source import Marks, Reader, Source
from mllm_compile.text.calls.syntax import SPACE, CallSyntax, Channels, ChatSyntax, Literal, Reasoning
from mllm_compile.text.calls.tools import Tool


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
        self._output = Output(make_id or (lambda: new_id(syntax.ids_are_short)), is_parallel)
        self._source = Source()
        self._stripped = Marks(stripped)
        self._unstripped = Source()
        if isinstance(syntax.calls, Channels):
            self._reader = read_channels(self._source, self._output, syntax.calls, self._tools)
        else:
            calls = syntax.calls if self._tools else None
            self._reader = self._read_answer(syntax.reasoning, calls, reasoning_is_open)
        self._resume()

    @property
    def is_done(self) -> bool:
        """True once there has been a call and may be no other: the model need not go on."""
        return self._output.is_done

    def push(self, text: str) -> list[Event]:
        """Adds text; returns what is certain now. Text after `is_done` is dropped."""
        self._push(text, is_last=False)
        return self._output.take()

    def finish(self, reason: str) -> list[Event]:
        """Ends the answer.

        Args:
            reason: why the model stopped: `length`, `stop`, or another one of the engine's.

        Returns:
            The text that was held back, and the End. Its reason is `tool_calls` if the model stopped with a call begun.
        """
        self._push("", is_last=True)
        return [*self._output.take(), End("tool_calls" if reason == "stop" and self._output.num_calls else reason)]

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

    def _read_answer(self, reasoning: Reasoning | None, calls: CallSyntax | None, is_open: bool) -> Reader[None]:
        if reasoning is not None:
            is_begun = yield from self._source.accept(Literal(reasoning.begin))
            if is_begun or is_open:
                yield from self._read_reasoning(reasoning)
        if calls is None:
            yield from self._source.until(Marks(()), self._output.content)
        else:
            yield from self._read_sections(calls)
        self._output.content_ends()

    def _read_sections(self, calls: CallSyntax) -> Reader[None]:
        """Reads content and the sections of calls in it."""
        sections = SectionReader(self._source, self._output, calls, self._tools)
        leads = {Literal(text).first: Literal(text) for text in calls.also_begin}
        if calls.is_marked:
            leads[Literal(calls.opening).first] = Literal("")
        else:
            yield from sections.read_section(Literal(""), "")
        marks = Marks(leads)
        while not self.is_done and (mark := (yield from self._source.until(marks, self._output.content))):
            yield from sections.read_section(leads[mark], mark)

    def _read_reasoning(self, reasoning: Reasoning) -> Reader[None]:
        yield from self._source.skip_space()
        space = ""

        def reason(text: str) -> None:
            nonlocal space
            shown = (space + text).rstrip(SPACE)
            space = (space + text)[len(shown) :]
            if shown:
                self._output.reasoning(shown)

        if (yield from self._source.until(Marks([reasoning.end]), reason)):
            self._source.take_to(self._source.at + len(reasoning.end))
            self._output.reasoning_ends()
