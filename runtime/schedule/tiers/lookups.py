"""Lookups: what a store below has that does not tell by itself. Each request has one, and waits for the answer.

What is found is in the index of the tier below from then on, as files are from the start. Free of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.tiers.index import Entry
from mllm_compile.runtime.schedule.tiers.shelves import Shelves
from mllm_compile.runtime.schedule.tiers.ticket import Ticket


class Lookups:
    """Used by the engine's thread alone."""

    def __init__(self, shelves: Shelves) -> None:
        self._shelves = shelves
        self._asked: dict[Ticket, Request] = {}
        self._waiting: dict[Request, int] = {}  # answers that are still to come
        self._answered: set[Request] = set()

    def __bool__(self) -> bool:
        """Answers are to come."""
        return bool(self._asked)

    def is_for(self, request: Request) -> bool:
        """True if the request waits for an answer."""
        return request in self._waiting

    def has_asked(self, request: Request) -> bool:
        """True if the request has had its lookup."""
        return request in self._answered

    def holds_back(self, request: Request, path: Sequence[Entry]) -> bool:
        """True if a request waits for an answer.

        Args:
            path: entries of the pages of its prompt that the prefix cache lacks, and of those with a state to ask for.
        """
        if request in self._answered:
            return False
        self._answered.add(request)
        shelves = self._shelves
        kinds = [False, True] if shelves.has_states else [False]
        for is_state in kinds:
            unknown = [
                replace(one, parent=b"") if is_state else one for one in path if shelves.find(one.key, is_state) is None
            ]
            if unknown:
                ticket = Ticket("lookup", unknown, is_state=is_state, source=shelves.source_of(request))
                shelves.copies.begin(ticket)
                self._asked[ticket] = request
                self._waiting[request] = self._waiting.get(request, 0) + 1
        return self.is_for(request)

    def leave(self, request: Request) -> None:
        """Notes that a request waits no longer."""
        self._waiting.pop(request, None)
        self._answered.discard(request)

    def over(self, ticket: Ticket) -> bool:
        """Takes an answer in; False: the ticket is no lookup."""
        request = self._asked.pop(ticket, None)
        if request is None:
            return False
        index = self._shelves.below[ticket.is_state]
        for entry, is_missing in zip(ticket.entries, ticket.failed, strict=True):
            if not is_missing and entry.key not in index:
                for slot in index.take(1):
                    index.put(replace(entry, slot=slot))
        if request in self._waiting:
            self._waiting[request] -= 1
            if not self._waiting[request]:
                del self._waiting[request]
        self._shelves.changes += 1
        return True
