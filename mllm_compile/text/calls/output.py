"""Puts what is read into events: joins texts, counts calls, and drops the white space that only separates."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable

from mllm_compile.text.calls.events import ArgumentsDelta, CallEnd, CallStart, ContentDelta, Event, ReasoningDelta
from mllm_compile.text.calls.syntax import SPACE

_SHORT_ID = string.ascii_letters + string.digits


def new_id(is_short: bool) -> str:
    """An id for a call that the model gave none."""
    if is_short:
        return "".join(secrets.choice(_SHORT_ID) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


class Output:
    """The events of one answer.

    Args:
        make_id: gives ids to calls whose model gives none.
        is_parallel: there may be several calls.

    Attributes:
        num_calls: calls that have started.
        is_open: the last of them has not ended.
        is_done: there has been a call, and may be no other.
    """

    def __init__(self, make_id: Callable[[], str], is_parallel: bool) -> None:
        self._make_id = make_id
        self._is_parallel = is_parallel
        self._events: list[Event] = []
        self._arguments: list[str] = []  # of the open call, since the last `take`
        self._space: list[str] = []  # at the end of the content so far; shown when more content follows
        self._drops_space = False  # ahead of content: it separates it from what was before
        self.num_calls = 0
        self.is_open = False
        self.is_done = False

    def take(self) -> list[Event]:
        """The events since the last time."""
        self._show_arguments()
        events, self._events = self._events, []
        return events

    def reasoning(self, text: str) -> None:
        self._events.append(ReasoningDelta(text))

    def reasoning_ends(self) -> None:
        self._drops_space = True

    def content(self, text: str) -> None:
        if self._drops_space:
            text = text.lstrip(SPACE)
            self._drops_space = not text
        shown = text.rstrip(SPACE)
        if shown:
            self._events.append(ContentDelta("".join([*self._space, shown])))
            self._space = []
        if len(shown) < len(text):
            self._space.append(text[len(shown) :])

    def content_ends(self) -> None:
        """Shows the white space at its end: nothing follows that it separates from."""
        if self._space:
            self._events.append(ContentDelta("".join(self._space)))
            self._space = []

    def start_call(self, name: str, call_id: str | None) -> None:
        self._space, self._drops_space, self.is_open = [], True, True
        self._events.append(CallStart(self.num_calls, call_id or self._make_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        self._arguments.append(text)

    def _show_arguments(self) -> None:
        if text := "".join(self._arguments):
            self._events.append(ArgumentsDelta(self.num_calls - 1, text))
        self._arguments = []

    def end_call(self, is_whole: bool) -> None:
        self._show_arguments()
        self._events.append(CallEnd(self.num_calls - 1, is_whole))
        self.is_open = False
        self.is_done = not self._is_parallel
