"""Milliseconds by what they are of. Each is told when it is measured: a run that is cut off has shown what it saw."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_WIDTH = 44


class Rounds:
    """The times of several rounds; the first one warms up."""

    def __init__(self) -> None:
        self._found: dict[str, list[float]] = {}

    def add(self, what: str, milliseconds: float) -> None:
        """Keeps a time, and tells it."""
        times = self._found.setdefault(what, [])
        times.append(milliseconds)
        print(f"  {what:{_WIDTH}} {milliseconds:9.1f} ms, time {len(times)}")

    def timed(self, what: str, function: Callable[[], T]) -> T:
        """Calls a function, and keeps its time."""
        began = time.perf_counter()
        found = function()
        self.add(what, (time.perf_counter() - began) * 1e3)
        return found

    def show(self) -> None:
        """Prints the first time of each, the median and the most of those behind it."""
        for what, (first, *later) in self._found.items():
            every = later or [first]
            median = statistics.median(every)
            print(f"{what:{_WIDTH}} first {first:9.1f} ms, then {median:9.1f}, at most {max(every):9.1f}")
