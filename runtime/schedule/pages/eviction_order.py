"""The order in which the prefix cache gives pages up: its runs that nobody has locked, the least recently used first.

A ring of links that the runs carry themselves: unlike in an OrderedDict, the parts of a run that is divided can stay
next to each other. Sessions (sessions.py) bias it: there is a ring each for runs that are of no further use, for
others, and for each time that runs are retained. Free of torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from mllm_compile.runtime.schedule.pages.sessions import TaggedRun


class Link(TaggedRun):
    """A place in the order; runs inherit it."""

    __slots__ = ("_newer", "_older")

    def __init__(self) -> None:
        super().__init__()
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
        insert_behind(self._end._older, run)


def insert_behind(older: Link, run: Link) -> None:
    """Put a run right behind another one."""
    newer = older._newer
    run._older, run._newer = older, newer
    older._newer = newer._older = run


def remove(run: Link) -> None:
    """Take a run out of its order."""
    run._older._newer, run._newer._older = run._newer, run._older
    run._older = run._newer = run


class BiasedOrder(Generic[Run]):
    """Orders one behind another: runs of no further use, those whose time of retention is over, all others, and those
    that are retained, the one first whose time ends first.

    Args:
        make_end: of an order.
        child_of: a run behind this one, which has to go before it, or None.
    """

    def __init__(self, make_end: Callable[[], Run], child_of: Callable[[Run], Run | None]) -> None:
        self._make_end = make_end
        self._child_of = child_of
        self._over, self._plain = EvictionOrder(make_end()), EvictionOrder(make_end())
        self._retained: dict[int, EvictionOrder[Run]] = {}  # by seconds

    def __iter__(self) -> Iterator[Run]:
        for order in (self._over, self._plain, *self._retained.values()):
            yield from order

    @property
    def first(self) -> Run | None:
        """The run to be given up next, behind which there is no other; None without one."""
        while (run := self._first()) is not None and (child := self._child_of(run)) is not None:
            remove(run)  # a run behind it is wanted for longer: it goes right behind that
            insert_behind(child, run)
        return run

    def append(self, run: Run) -> None:
        """Put a run at the end of its order: it was used last."""
        tag = run.tag
        if tag is not None:
            tag.used_s = time.monotonic()
        self._order_of(run).append(run)

    def moved(self, run: Run) -> None:
        """Put a run at the end of its order, after its tag has changed."""
        remove(run)
        self.append(run)

    def _order_of(self, run: Run) -> EvictionOrder[Run]:
        tag = run.tag
        if tag is None:
            return self._plain
        if tag.is_over:
            return self._over
        if not tag.retain_s:
            return self._plain
        if tag.retain_s not in self._retained:
            self._retained[tag.retain_s] = EvictionOrder(self._make_end())
        return self._retained[tag.retain_s]

    def _first(self) -> Run | None:
        if (run := self._over.first) is not None:
            return run
        soonest: tuple[float, Run] | None = None
        for seconds, order in self._retained.items():
            if (run := order.first) is not None:
                ends = seconds + (0.0 if run.tag is None else run.tag.used_s)
                soonest = min(soonest or (ends, run), (ends, run), key=lambda entry: entry[0])
        if soonest is not None and soonest[0] <= time.monotonic():
            return soonest[1]
        return self._plain.first or (None if soonest is None else soonest[1])
