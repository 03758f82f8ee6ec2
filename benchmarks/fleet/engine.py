"""A simulated engine, by the clock of who calls it."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from benchmarks.fleet.conversation import Conversation

PAGE = 64
MAX_RUNNING, MAX_STEP = 256, 8192  # as the server's defaults


class Told(NamedTuple):
    """Happenings since the last ones.

    Attributes:
        first: calls that got their first token, with the seconds from their begin.
        ended: calls that are over, with the tokens of their prompts that were cached.
    """

    first: list[tuple[Any, float]]
    ended: list[tuple[Any, int]]


class Engine(Protocol):
    """One engine.

    Attributes:
        busy_s: in which it had something to do.
        next_s: when something will happen, unless it gets a call before; inf: never.
    """

    busy_s: float
    next_s: float

    def add(self, now_s: float, call: Any, messages: Conversation) -> None:
        """A call begins, with its prompt and the answer that it will have."""

    def go_on(self, now_s: float) -> Told:
        """Goes on to `next_s`, which is now."""
