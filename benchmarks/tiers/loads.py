"""Loads that no request waits for: what copies from the host's memory alone cost the steps beside them."""

from __future__ import annotations

from collections import deque

import numpy as np

from benchmarks.tiers.behind import scheduler_of, tiers_of
from mllm_compile import Engine
from mllm_compile.runtime.schedule.tiers.index import Entry
from mllm_compile.runtime.schedule.tiers.ticket import Ticket

_AT_ONCE = 2  # as those of requests


class LoadsAlone:
    """Loads pages of the host's memory into free ones of the KV cache, one copy behind the other, while it is entered.

    Args:
        num_pages: that it takes for this; as many are free.

    Attributes:
        num_bytes: that have arrived.
    """

    def __init__(self, engine: Engine, num_pages: int) -> None:
        self._engine, self._num_pages = engine, num_pages
        self._tiers, self._copies = tiers_of(engine)
        self._flying: set[Ticket] = set()
        self._parts: deque[tuple[list[Entry], np.ndarray]] = deque()
        self._is_ending = False
        self.num_bytes = 0

    def __enter__(self) -> LoadsAlone:
        self._engine.core.between_steps(self._begin)
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.core.between_steps(self._end)

    def _begin(self) -> None:
        shelves, tables = self._tiers._shelves, scheduler_of(self._engine).pages
        entries = list(shelves.host[False])[: min(self._num_pages, tables.available_pages)]
        self._pages = tables.take_for_load(len(entries))
        for start in range(0, len(entries), shelves.piece):
            part = entries[start : start + shelves.piece]
            self._parts.append((part, self._pages[start : start + len(part)]))
        self._others_finished = self._copies.finished
        self._copies.finished = self._finished
        for _ in range(min(_AT_ONCE, len(self._parts))):
            self._next()

    def _next(self) -> None:
        entries, pages = self._parts[0]
        self._parts.rotate(-1)
        ticket = Ticket("load", entries, pages, from_below=np.zeros(len(entries), dtype=bool))
        self._flying.add(ticket)
        self._copies.begin(ticket)

    def _finished(self) -> list[Ticket]:
        """Keeps its own tickets from the scheduler, and begins the next."""
        others = []
        for ticket in self._others_finished():
            if ticket not in self._flying:
                others.append(ticket)
                continue
            self._flying.discard(ticket)
            self.num_bytes += len(ticket.entries) * self._copies.page_bytes
            if not self._is_ending:
                self._next()
        return others

    def _end(self) -> None:
        self._is_ending = True
        self._copies.wait_for_tickets(list(self._flying))
        self._tiers.advance()
        self._copies.finished = self._others_finished
        scheduler_of(self._engine).pages.give_back_loaded(self._pages)
