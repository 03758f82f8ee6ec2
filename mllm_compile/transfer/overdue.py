"""Deadlines that a thread of its own sees pass: the one that expects something may wait in a call that is held up."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable


class Overdue:
    """Deadlines of things that come in their order.

    A thread is there while something is expected, and until the last deadline at most.

    Args:
        end: called once one has passed; from that thread.
    """

    def __init__(self, end: Callable[[], None], name: str) -> None:
        self._end, self._name = end, name
        self._deadlines: deque[float] = deque()
        self._stopped = threading.Condition()
        self._is_watched = False
        self._looks_at = 0.0  # the deadline that the thread waits for

    def expect(self, within_s: float) -> None:
        """Expects one more, within so many seconds from now."""
        with self._stopped:
            self._deadlines.append(time.monotonic() + within_s)
            self._wake_if_earlier()
            is_first, self._is_watched = not self._is_watched, True
        if is_first:
            threading.Thread(target=self._watch, name=self._name, daemon=True).start()

    def came(self) -> None:
        """Notes that the thing that was expected first is there."""
        with self._stopped:
            if self._deadlines:
                self._deadlines.popleft()
            self._wake_if_earlier()

    def stop(self) -> None:
        """Expects nothing more."""
        with self._stopped:
            self._deadlines.clear()
            self._stopped.notify_all()

    def _wake_if_earlier(self) -> None:
        """Wakes the thread where it waits for a later deadline than the next one."""
        if self._deadlines and self._deadlines[0] < self._looks_at:
            self._stopped.notify_all()

    def _watch(self) -> None:
        with self._stopped:
            while self._deadlines and (left := self._deadlines[0] - time.monotonic()) > 0:
                self._looks_at = self._deadlines[0]
                self._stopped.wait(left)
            is_late, self._is_watched = bool(self._deadlines), False
        if is_late:
            self._end()
