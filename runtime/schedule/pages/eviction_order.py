"""The order in which the prefix cache gives pages up: its runs that nobody has locked, the least recently used first.

A ring of links that the runs carry themselves: unlike in an OrderedDict, the parts of a run that is divided can stay
next to each other. Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar


class Link:
    """A place in the order; runs inherit it."""

    __slots__ = ("_newer", "_older")

    def __init__(self) -> None:
        self._older: Any = self  # a run, like the next one
        self._newer: Any = self


Run = TypeVar("Run", bound=Link)


class EvictionOrder(Generic[Run]):
    """Runs in their order; each is in it once or not at all."""

    def __init__(self, end: Run) -> None:
        """Args: end: no run of it, but where the order begins and ends."""
        self._end = end

    def __iter__(self) -> Iterator[Run]:
        run: Run = self._end._newer
        while run is not self._end:
            yield run
            run = run._newer

    @property
    def first(self) -> Run | None:
        """The run to be given up next; None without one."""
        run: Run = self._end._newer
        return None if run is self._end else run

    def append(self, run: Run) -> None:
        """Put a run at the end: it was used last."""
        self.insert_behind(self._end._older, run)

    def insert_behind(self, older: Run, run: Run) -> None:
        """Put a run right behind another one."""
        newer = older._newer
        run._older, run._newer = older, newer
        older._newer = newer._older = run

    def remove(self, run: Run) -> None:
        """Take a run out of the order."""
        run._older._newer, run._newer._older = run._newer, run._older
        run._older = run._newer = run
