"""Admission: a bound on the prompts that the engine has neither begun nor has a slot for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn, Self

from mllm_compile.server.api.errors import ApiError

_TIMES_RUNNING = 4  # of those that can run, so many may wait
_BEFORE_READY = 256  # as many as these can run, until an engine says
_RECENT = 64
_LONGEST_RETRY_S = 60


class Place:
    """The place of a request whose prompts wait together until it is over; a context, which leaves it.

    One prompt is counted until the request says how many there are.

    Raises:
        ApiError: too many wait.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission, self._count = admission, 0
        self.hold(1)

    def hold(self, count: int) -> None:
        """Counts so many prompts in place of those so far.

        Raises:
            ApiError: with them too many wait; none of it is counted any more.
        """
        self._admission.waiting -= self._count
        self._count = 0
        self._admission.enter(count)
        self._count = count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._admission.leave(self._count)


class Admission:
    """Counts the prompts that wait.

    Args:
        most: how many may; None: a multiple of those that can run.
        num_running: of completions that the engine has begun, and not ended.

    Attributes:
        most: how many may wait, beside those that can run.
        max_running: prompts that can run.
        waiting, refused: prompts.
    """

    def __init__(self, most: int | None, num_running: Callable[[], int]) -> None:
        self._num_running = num_running
        self.max_running = _BEFORE_READY
        self._asked = most
        self.most = most or 0
        self.waiting = 0
        self.refused = 0
        self._left: deque[float] = deque(maxlen=_RECENT)  # when the last ones were begun

    def engine_ready(self, max_running: int) -> None:
        """Takes the bound from an engine."""
        self.max_running = max_running
        self.most = self._asked or _TIMES_RUNNING * max_running

    def enter(self, count: int, is_bounded: bool = True) -> None:
        """Counts prompts that begin to wait, if only for the next step. A list that is longer than the bound is taken
        when nothing waits.

        Args:
            is_bounded: False of a request that has begun, for its next prompt.

        Raises:
            ApiError: too many wait.
        """
        if is_bounded and self.waiting and self.waiting + count > self.most:
            most = self.most + max(0, self.max_running - self._num_running())
            if self.waiting + count > most:
                self._refuse(count, most)
        self.waiting += count

    def _refuse(self, count: int, most: int) -> NoReturn:
        self.refused += 1
        fits = "Ask again later." if count <= most else f"The request has {count}: send them in parts."
        raise ApiError(
            429,
            f"{self.waiting} prompts wait, of at most {most}. {fits}",
            code="queue_full",
            retry_after_s=self._retry_after(),
        )

    def place(self) -> Place:
        """The place of a request whose prompts wait together.

        Raises:
            ApiError: too many wait.
        """
        return Place(self)

    def leave(self, count: int = 1) -> None:
        """Counts prompts that wait no longer."""
        self.waiting -= count
        self._left.extend([time.monotonic()] * min(count, _RECENT))

    def _retry_after(self) -> int:
        """Seconds until those that wait now will have begun, at the speed of the last ones."""
        if len(self._left) < 2:
            return 1
        seconds_each = (time.monotonic() - self._left[0]) / len(self._left)
        return max(1, min(_LONGEST_RETRY_S, round(self.waiting * seconds_each)))
