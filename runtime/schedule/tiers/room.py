"""Room in the KV cache: what it is about to give up is copied to the host's memory first, where that is written back.

A few pages are always given up ahead of who needs them. A request that needs more of them than are free waits for its
room, and steps of others run; what it got is free for it and for more urgent ones. Pages on their way are nobody's:
they are free when their copy is over, so no step writes them before, and none waits. Who takes pages beyond that, as
answers that grow may, has the cache drop them.

Then the cache and the host's memory have different pages: together they hold nearly what their sizes add up to. Of
what both have, the host's memory gives up the page first that the cache keeps longest. Free of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.schedule.pages.page_run import PageRun
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.tiers.index import Entry
from mllm_compile.runtime.schedule.tiers.shelves import Shelves
from mllm_compile.runtime.schedule.tiers.stores import Stores, bias_of
from mllm_compile.runtime.schedule.tiers.ticket import Ticket

_SPARE = 1 / 16  # of all pages: those that are given up ahead of who needs them
_MOST_TRIES = 4  # of a request: answers that grow may have taken what was free for it
_MOST_LEAVING = 0.125  # of all pages: those that are on their way at once


@dataclass(slots=True)
class _Wish:
    """The request that waits for room.

    Attributes:
        run: the locked end of its path in the prefix cache.
        num_pages: free pages that it needs.
        num_left: pages that may still be given up for it: others may take what is free meanwhile.
    """

    request: Request
    run: PageRun | None
    num_pages: int
    num_left: int


class Room:
    """Used by the engine's thread alone; a watcher of the prefix cache."""

    def __init__(self, shelves: Shelves, stores: Stores) -> None:
        self._shelves, self._stores, self._cache = shelves, stores, shelves.pages.cache
        self._allocator = shelves.pages.allocator
        self._spare = max(1, int(self._allocator.usable_pages * _SPARE))
        self._most = max(1, int(self._allocator.usable_pages * _MOST_LEAVING))
        self._leaving: set[bytes] = set()
        self._tickets: set[Ticket] = set()
        self._given_up: list[tuple[Entry, int]] | None = None  # with their pages, while the cache gives up
        self._wish: _Wish | None = None
        self._granted: dict[Request, int] = {}  # pages that are free for requests which wait on, as for a load
        self._num_granted = 0
        self._tries: dict[Request, int] = {}  # how often they have waited
        self._behind: set[Request] = set()  # requests that are looked at again when that has changed

    def __bool__(self) -> bool:
        """Pages are on their way."""
        return bool(self._tickets)

    @property
    def has_more(self) -> bool:
        """Pages would be given up now."""
        return self._num_short > 0

    @property
    def _num_short(self) -> int:
        """Pages to be given up now."""
        free = self._allocator.available_pages + len(self._leaving)
        short = self._spare - (free - self._num_granted)
        short = 0 if 2 * short < self._spare else short
        if self._wish is not None:
            short = max(short, min(self._wish.num_pages - free, self._wish.num_left))
        return min(short, self._most - len(self._leaving), self._cache.evictable_pages)

    # --- requests that wait -------------------------------------------------------------------------------------------

    def is_for(self, request: Request) -> bool:
        """True if the request waits for room, its own or others', or for pages on their way."""
        return request in self._behind or (self._wish is not None and self._wish.request is request)

    def is_taken(self, request: Request, num_needed: int, num_promised: int) -> bool:
        """True if a request waits since those ahead of it take what is free, whatever of its path is to be loaded.

        Args:
            num_needed: pages that it needs at least.
            num_promised: as holds_back has it.
        """
        if request in self._granted or not (self._cache.evictable_pages or self._tickets):
            return False
        ahead = self._ahead_of(request)
        is_short = num_needed + num_promised + sum(ahead) > self._allocator.available_pages
        if not is_short or (self._wish is None and not ahead):
            return False
        self._behind.add(request)
        return True

    def holds_back(
        self, request: Request, run: PageRun | None, num_needed: int, num_promised: int, rest: Sequence[bytes]
    ) -> bool:
        """True if a request waits for room, or for what it needs to have left the cache.

        Args:
            run: the end of its path in the prefix cache.
            num_needed: pages that it needs behind that.
            num_promised: pages that others will take, whom this knows no more.
            rest: the keys of its prompt's pages behind that.
        """
        if rest and rest[0] in self._leaving:
            self._behind.add(request)
            return True
        free, tries = self._allocator.available_pages, self._tries.get(request, 0)
        if request in self._granted:
            self._num_granted -= self._granted.pop(request)
            if num_needed <= free or tries >= _MOST_TRIES:
                self._grant(request, num_needed)
                return False
        ahead = self._ahead_of(request)
        wanted = num_needed + num_promised + sum(ahead)
        if wanted <= free:
            self._grant(request, num_needed)
            return False
        if not self._cache.evictable_pages and not self._tickets:
            return False
        if self._wish is not None or ahead:  # their pages would leave for what waits longer
            self._behind.add(request)
            return True
        self._cache.lock(run)
        self._shelves.host[False].use(rest)
        self._wish = _Wish(request, run, wanted, wanted - free)
        self._tries[request] = tries + 1
        self._grant(request, num_needed)
        self.advance()
        return self._wish is not None

    def _ahead_of(self, request: Request) -> list[int]:
        """Pages that are free for each request that is more urgent."""
        return [count for one, count in self._granted.items() if one.urgency < request.urgency]

    def _grant(self, request: Request, num_pages: int) -> None:
        self._granted[request] = max(0, num_pages)
        self._num_granted += max(0, num_pages)

    def took(self, request: Request, num_pages: int) -> None:
        """Notes that a request has pages for its load."""
        left = max(0, self._granted.get(request, 0) - num_pages)
        self._num_granted -= self._granted.pop(request, 0)
        self._grant(request, left)

    def leave(self, request: Request) -> None:
        """Notes that a request waits no longer."""
        self._num_granted -= self._granted.pop(request, 0)
        self._tries.pop(request, None)
        self._behind.clear()
        if self._wish is not None and self._wish.request is request:
            self._end_wish()

    # --- time goes on -------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Has the cache give up what is to be free."""
        while (short := self._num_short) > 0:
            self._give_up(short)
        if self._wish is not None and not self._tickets:
            self._end_wish()

    def stop(self) -> None:
        """Has nobody wait for more room than there is."""
        if self._wish is not None:
            self._end_wish()

    def over(self, ticket: Ticket) -> bool:
        """Takes a copy in that is over; False: it is another's."""
        if ticket not in self._tickets:
            return False
        self._tickets.discard(ticket)
        self._leaving.difference_update(entry.key for entry in ticket.entries)
        self._allocator.free(ticket.pages)
        self._stores.take_in(ticket)
        for entry, has_failed in zip(ticket.entries, ticket.failed.tolist(), strict=True):
            if has_failed:
                self._shelves.host[False].tell_gone(entry.key)
        self._look_again()
        return True

    def _end_wish(self) -> None:
        assert self._wish is not None, "called by those who have looked"
        self._cache.unlock(self._wish.run)
        self._wish = None
        self._look_again()

    def _look_again(self) -> None:
        self._behind.clear()
        self._shelves.changes += 1

    def _give_up(self, count: int) -> None:
        """Has the cache give up pages; those that the host's memory lacks are on their way there then."""
        shelves, index = self._shelves, self._shelves.host[False]
        self._given_up = []
        pages = self._cache.evict(count)
        given_up, self._given_up = self._given_up, None
        if self._wish is not None:
            self._wish.num_left -= pages.size
        slots = index.take(len(given_up))
        for entry, _ in given_up[len(slots) :]:
            index.tell_gone(entry.key)
        leaving = given_up[: len(slots)]
        for (entry, _), slot in zip(leaving, slots, strict=True):
            entry.slot = slot
        self._allocator.free(np.setdiff1d(pages, [page for _, page in leaving]))
        for start in range(0, len(leaving), shelves.piece):
            part = leaving[start : start + shelves.piece]
            entries = [entry for entry, _ in part]
            ticket = Ticket("store", entries, np.array([page for _, page in part], dtype=np.int32))
            self._tickets.add(ticket)
            self._leaving.update(entry.key for entry in entries)
            shelves.copies.begin(ticket)

    # --- what the prefix cache tells ----------------------------------------------------------------------------------

    def stored(self, run: PageRun) -> None:
        """Notes that the cache has pages now."""
        self._shelves.host[False].note_above(self._shelves.keys_of(run), is_above=True)

    def removed(self, run: PageRun, num_kept: int) -> None:
        """Notes that the cache has pages no more; those that the host's memory lacks are to go there."""
        shelves, index = self._shelves, self._shelves.host[False]
        keys = shelves.keys_of(run)
        index.note_above(keys[num_kept:], is_above=False)
        if self._given_up is None:
            return
        is_ended, until = bias_of(run)
        if not is_ended:
            index.use(keys[num_kept:])
        path = list(self._cache.path_of(run))
        first, before = shelves.keys_of(path[-1])[0], sum(one.pages.size for one in path[1:])
        for place in range(num_kept, len(keys)):
            if keys[place] in index:
                continue
            parent = keys[place - 1] if place else self._cache.use_keys(shelves.secret).parent_of(run)
            depth = (before + place + 1) * shelves.page_size
            entry = Entry(keys[place], parent, first, depth, -1, until=until, is_ended=is_ended)
            self._given_up.append((entry, int(run.pages[place])))
            index.tell(keys[place], is_coming=True)

    def forgotten(self, run: PageRun) -> None:
        """Stores has the index forget them."""

    def cleared(self) -> None:
        """Notes that the cache has nothing now."""
        self._shelves.host[False].clear_above()
