"""An answer as blocks that follow each other: reasoning, text and calls, as /v1/messages and /v1/responses tell it.

A stream and a whole answer are told from the same blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from mllm_compile.server.flow.choice import Choice
from mllm_compile.text.calls.events import ArgumentsDelta, CallEnd, CallStart, ContentDelta, Event, ReasoningDelta
from mllm_compile.text.calls.messages import joined


class Kind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class Change(Enum):
    """A change of a block; `GROWS` comes with more of its text."""

    BEGINS = "begins"
    GROWS = "grows"
    ENDS = "ends"


@dataclass(slots=True, eq=False)
class Block:
    """A part of an answer.

    Attributes:
        index: its number in the answer.
        call: id and name, of a call, whose text is its arguments.
        is_whole: False: the answer was cut in it.
    """

    index: int
    kind: Kind
    call: CallStart | None = None
    parts: list[str] = field(default_factory=list)
    is_whole: bool = True

    @property
    def text(self) -> str:
        return "".join(self.parts)


class Blocks:
    """The blocks of one answer.

    Args:
        is_read: a parser reads the answer; else all of it is text.
        shows_reasoning: it is among them.
    """

    def __init__(self, is_read: bool, shows_reasoning: bool) -> None:
        self._is_read = is_read
        self._shows_reasoning = shows_reasoning
        self._all: list[Block] = []
        self._open: Block | None = None

    def news(self, choice: Choice) -> Iterator[tuple[Change, Block, str]]:
        """The changes that a completion's news make to the blocks."""
        if not self._is_read:
            events: Iterable[Event] = (ContentDelta(choice.text),) if choice.text else ()
        else:
            events = joined(choice.events)
        for event in events:
            if isinstance(event, CallStart):
                yield from self._turn_to(Kind.CALL, event)
            elif isinstance(event, ContentDelta):
                yield from self._grow(Kind.TEXT, event.text)
            elif isinstance(event, ReasoningDelta) and self._shows_reasoning:
                yield from self._grow(Kind.REASONING, event.text)
            elif isinstance(event, ArgumentsDelta):
                yield from self._grow(Kind.CALL, event.text)
            elif isinstance(event, CallEnd) and self._open is not None:
                self._open.is_whole = event.is_whole
                yield from self._close()

    def end(self, choice: Choice) -> Iterator[tuple[Change, Block, str]]:
        """The changes that its end makes; an answer has at least one block, a text."""
        if not self._all:
            yield from self._turn_to(Kind.TEXT, None)
        if self._open is not None:
            self._open.is_whole = choice.finish_reason != "length"
            yield from self._close()

    def whole(self, choice: Choice) -> list[Block]:
        """The blocks of an answer that was not streamed."""
        for _ in (*self.news(choice), *self.end(choice)):
            pass
        return self._all

    @property
    def all(self) -> list[Block]:
        return self._all

    def _grow(self, kind: Kind, text: str) -> Iterator[tuple[Change, Block, str]]:
        if self._open is None or self._open.kind is not kind:
            yield from self._turn_to(kind, None)
        block = self._all[-1]
        block.parts.append(text)
        yield Change.GROWS, block, text

    def _turn_to(self, kind: Kind, call: CallStart | None) -> Iterator[tuple[Change, Block, str]]:
        yield from self._close()
        self._open = Block(len(self._all), kind, call)
        self._all.append(self._open)
        yield Change.BEGINS, self._open, ""

    def _close(self) -> Iterator[tuple[Change, Block, str]]:
        if self._open is not None:
            block, self._open = self._open, None
            yield Change.ENDS, block, ""
