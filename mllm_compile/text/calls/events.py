"""The events that a parser makes of a model's text. Texts of one kind that follow each other belong together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins; calls of an answer count from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments, JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call has ended.

    Attributes:
        is_whole: the call was written to its end; if not, its arguments may be no valid JSON.
    """

    index: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class End:
    """The answer has ended, for a reason of OpenAI's."""

    finish_reason: str


Event = ContentDelta | ReasoningDelta | CallStart | ArgumentsDelta | CallEnd | End
