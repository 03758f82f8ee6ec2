"""Loads: which request waits for what, and what becomes of pages that arrive. tiers.py says why this is safe.

Free of torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mllm_compile.runtime.schedule.pages.page_run import PageRun, Salt
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.tiers.index import Entry
from mllm_compile.runtime.schedule.tiers.lookups import Lookups
from mllm_compile.runtime.schedule.tiers.prompt_keys import PromptKeys
from mllm_compile.runtime.schedule.tiers.room import Room
from mllm_compile.runtime.schedule.tiers.shelves import Shelves
from mllm_compile.runtime.schedule.tiers.ticket import Ticket

_MOST = 2  # at once: they share the link
# Of a request: what came may be gone before it is admitted, or be no more than others' part of its path. A load takes a
# tenth of the time that computing it takes.
_MOST_TRIES = 32


@dataclass(slots=True, eq=False)
class _Load:
    """A load in flight.

    Attributes:
        token_ids: [n * page_size] int64, of the whole path by the prefix cache's keys.
        run: the locked end of the path that is in the prefix cache.
        num_pages: pages of that path.
        tickets: the copies, in the order of the path; the state's is the last.
        waiting: requests that wait for it.
        num_loaded: pages that have arrived, from the host and from the tier below.
        has_failed: a page has not arrived: those behind it are of no use.
    """

    token_ids: np.ndarray
    salt: Salt
    run: PageRun | None
    num_pages: int
    tickets: deque[Ticket] = field(default_factory=deque)
    done: set[Ticket] = field(default_factory=set)
    waiting: set[Request] = field(default_factory=set)
    num_loaded: tuple[int, int] = (0, 0)
    has_failed: bool = False


@dataclass(slots=True)
class _Found:
    """The part of a request's path that tiers have beyond the prefix cache.

    Attributes:
        run: the end of the path in the prefix cache, of `have` pages.
        entries: the pages behind it.
        state: the state to begin with; None: a model without states.
        end: pages of the path that the request can begin behind.
        cached: pages that it could begin behind without a load.
    """

    run: PageRun | None
    have: int
    entries: list[Entry]
    state: Entry | None
    end: int
    cached: int


class Loads:
    """Used by the engine's thread alone.

    Args:
        room: where requests wait for it; None: the prefix cache drops what it gives up.
    """

    def __init__(self, shelves: Shelves, room: Room | None = None) -> None:
        self._shelves, self._cache, self._room = shelves, shelves.pages.cache, room
        self._loads: dict[Ticket, _Load] = {}
        self._loading: dict[bytes, _Load] = {}  # by the keys of the pages that are on their way
        self._waits: dict[Request, _Load] = {}
        # Of the loads that requests have waited for: pages from the host, and from the tier below.
        self._tried: dict[Request, list[tuple[int, int]]] = {}
        self._later: set[Request] = set()  # requests that are looked at again when a load has ended
        self._lookups, self._keys = Lookups(shelves), PromptKeys(shelves)

    def __bool__(self) -> bool:
        """Loads are in flight, or lookups."""
        return bool(self._loads or self._lookups)

    def is_for(self, request: Request) -> bool:
        """True if the request waits for a load, its own or others', or for a lookup."""
        return request in self._waits or request in self._later or self._lookups.is_for(request)

    def holds_back(
        self, request: Request, token_ids: np.ndarray, salt: Salt, num_needed: int, num_promised: int
    ) -> bool:
        """See Tiers.holds_back."""
        if self.is_for(request):
            return True
        is_last = len(self._tried.get(request, ())) >= _MOST_TRIES
        if is_last and self._room is None:
            return False
        shelves = self._shelves
        run, pages = self._cache.match_prefix(token_ids, salt)
        if is_last:
            return self._waits_for_room(request, *self._of_use(run, pages.size), num_needed, num_promised)
        has_to_ask = not self._lookups.has_asked(request) and shelves.has_to_ask(request)
        # Ahead of its path's keys, which take long: most looks at those that wait end here.
        room = self._room
        if room is not None and not has_to_ask and room.is_taken(request, num_needed - pages.size, num_promised):
            return True
        keys = self._keys.first(request, token_ids, salt, run, pages.size)
        known, first_missing = keys[: pages.size], keys[pages.size :]
        if first_missing and (on_its_way := self._loading.get(first_missing[0])) is not None:
            self._waits[request] = on_its_way
            on_its_way.waiting.add(request)
            return True
        # Once: a path of many pages takes its time at each step.
        if has_to_ask:
            keys = self._keys.all(request, token_ids, salt, keys)
            if self._lookups.holds_back(request, self._path(keys, pages.size, salt)):
                return True
        has_more = bool(first_missing) and shelves.find(first_missing[0]) is not None
        may_begin = len(set(self._loads.values())) < _MOST
        if has_more and not may_begin:
            self._later.add(request)
            return True
        behind = self._keys.all(request, token_ids, salt, keys)[pages.size :] if has_more else first_missing
        found = self._worth_it(request, run, known, behind if has_more else []) if may_begin else None
        prefix = self._of_use(run, pages.size) if found is None else (run, found.have)
        if self._waits_for_room(request, *prefix, num_needed, num_promised, behind):
            return True
        if found is None:
            return False
        return self._begin(request, token_ids[: found.end * shelves.page_size], salt, found, num_needed - found.have)

    def leave(self, request: Request) -> None:
        """Notes that a request waits no longer: it was admitted, or has ended."""
        self._tried.pop(request, None)
        self._later.discard(request)
        self._lookups.leave(request)
        self._keys.leave(request)
        load = self._waits.pop(request, None)
        if load is not None:
            load.waiting.discard(request)

    def pages_for(self, request: Request, num_cached: int) -> tuple[int, int]:
        """Cached pages, of so many of a request that is being admitted, that came from the host, and from the tier
        below: the last time, where they were given up and loaded again."""
        from_host = from_below = 0
        for host, below in reversed(self._tried.get(request, ())):
            from_below += min(below, num_cached - from_host - from_below)
            from_host += min(host, num_cached - from_host - from_below)
        return from_host, from_below

    def _waits_for_room(
        self,
        request: Request,
        run: PageRun | None,
        num_cached: int,
        num_needed: int,
        num_promised: int,
        rest: Sequence[bytes] = (),
    ) -> bool:
        room = self._room
        return room is not None and room.holds_back(request, run, num_needed - num_cached, num_promised, rest)

    def _path(self, path: Sequence[bytes], num_cached: int, salt: Salt) -> list[Entry]:
        """Entries of a prompt's pages that the prefix cache lacks; of all its pages where a model has states."""
        shelves = self._shelves
        begin = 0 if shelves.has_states else num_cached
        root = b"" if num_cached else shelves.pages.cache.use_keys(shelves.secret).root(salt)
        parents, size = [root, *path], shelves.page_size
        return [Entry(path[at], parents[at], path[0], (at + 1) * size, -1) for at in range(begin, len(path))]

    # --- what there is to load ----------------------------------------------------------------------------------------

    def _worth_it(
        self, request: Request, run: PageRun | None, known: Sequence[bytes], keys: Sequence[bytes]
    ) -> _Found | None:
        """The part of a path with these keys behind `known` that is worth a load; None: there is nothing."""
        found = self._found(run, known, keys) if keys or self._shelves.has_states else None
        is_worth_it = found is not None and (self._shelves.source_of(request) is not None or self._pays(found))
        return found if is_worth_it else None

    def _found(self, run: PageRun | None, known: Sequence[bytes], keys: Sequence[bytes]) -> _Found | None:
        """The part of a path with these keys behind `known` that could be loaded; None: there is nothing."""
        entries, have = self._shelves.find_path(keys), len(known)
        if not self._shelves.has_states:
            return _Found(run, have, entries, None, have + len(entries), have) if entries else None
        path, cached = [*known, *(entry.key for entry in entries)], self._of_use(run, have)[1]
        for depth in range(len(path), cached, -1):
            state = self._shelves.find(path[depth - 1], is_state=True)
            if state is not None:
                return _Found(run, have, entries[: max(0, depth - have)], state, depth, cached)
        return None

    def _of_use(self, run: PageRun | None, num_pages: int) -> tuple[PageRun | None, int]:
        """The part of a cached path of so many pages that a request finds without a load: its end, and its pages. With
        states it ends behind the last one of these."""
        if not self._shelves.has_states:
            return run, num_pages
        for one in self._cache.path_of(run):
            if one in self._cache.states:
                return one, num_pages
            num_pages -= one.pages.size
        return None, 0

    def _pays(self, found: _Found) -> bool:
        shelves = self._shelves
        below = sum(shelves.is_below(entry, is_state=False) for entry in found.entries) if shelves.below else 0
        num_bytes = [count * shelves.copies.page_bytes for count in (len(found.entries), below)]
        page_size = shelves.page_size
        return shelves.gain.pays(found.cached * page_size, found.end * page_size, *num_bytes)

    # --- a load begins ------------------------------------------------------------------------------------------------

    def _begin(self, request: Request, token_ids: np.ndarray, salt: Salt, found: _Found, num_needed: int) -> bool:
        """Begins to load what a request's path lacks; False: others need the memory.

        Args:
            num_needed: pages that the request needs besides those that are cached.
        """
        shelves, states = self._shelves, self._cache.states
        run, had = self._cache.match_prefix(token_ids, salt)
        self._cache.lock(run)
        fits, row = num_needed <= shelves.pages.available_pages, None
        if fits and found.state is not None:
            row = states.reserve(but_not=shelves.rows_to_read())
        sources = self._on_host(found.entries, is_state=False) if fits else []
        state = [] if found.state is None or row is None else self._on_host([found.state], is_state=True)
        is_whole = len(sources) == len(found.entries) and bool(state)  # a state is of use behind all of its pages alone
        if not (is_whole if found.state is not None else sources):
            self._let_go(sources, is_state=False)
            self._let_go(state, is_state=True)
            if row is not None:
                states.release(row)
            self._cache.unlock(run)
            return False
        load = _Load(token_ids, salt, run, had.size)
        pages = shelves.pages.take_for_load(len(sources))
        if self._room is not None:
            self._room.took(request, len(sources))
        for start in range(0, len(sources), shelves.piece):
            part = sources[start : start + shelves.piece]
            load.tickets.append(_ticket(part, pages[start : start + len(part)], is_state=False))
        if row is not None:
            load.tickets.append(_ticket(state, np.array([row], dtype=np.int32), is_state=True))
        load.waiting.add(request)
        self._waits[request] = load
        for ticket in load.tickets:
            shelves.copies.begin(ticket)
            self._loads[ticket] = load
            if not ticket.is_state:
                self._loading |= {entry.key: load for entry in ticket.entries}
        return True

    def _on_host(self, entries: Sequence[Entry], is_state: bool) -> list[tuple[Entry, bool]]:
        """The entries with a slot of the host's memory each, up to the first that gets none; they stay meanwhile.

        Returns:
            Each with True where the slot is new, and the tier below has the content.
        """
        index = self._shelves.host[is_state]
        found: list[tuple[Entry, bool]] = [(entry, self._shelves.is_below(entry, is_state)) for entry in entries]
        for entry, _ in found:
            entry.users += 1
        slots = index.take(sum(is_new for _, is_new in found))
        sources: list[tuple[Entry, bool]] = []
        for place, (entry, is_new) in enumerate(found):
            if is_new and not slots:
                for other, _ in found[place:]:
                    other.users -= 1
                break
            sources.append((replace(entry, slot=slots.pop(0), users=1, is_below=True) if is_new else entry, is_new))
        index.give_back(slots)
        return sources

    def _let_go(self, sources: Sequence[tuple[Entry, bool]], is_state: bool) -> None:
        """Takes `_on_host` back."""
        for entry, is_new in sources:
            if is_new:
                self._shelves.host[is_state].give_back([entry.slot])
                entry = self._shelves.below[is_state].get(entry.key) or entry
            entry.users -= 1

    # --- a load is over -----------------------------------------------------------------------------------------------

    def over(self, ticket: Ticket) -> bool:
        """Takes a copy in that is over, or a lookup; False: it is neither."""
        load = self._loads.pop(ticket, None)
        if load is None:
            return self._lookups.over(ticket)
        load.done.add(ticket)
        while load.tickets and load.tickets[0] in load.done:
            first = load.tickets.popleft()
            published = 0
            if first.is_state:
                self._take_state(load, first)
            else:
                published = self._take_pages(load, first)
            for place, entry in enumerate(first.entries):  # behind the pages, whose tokens watchers know then
                self._settle(first, place, entry, is_above=self._room is not None and place < published)
                self._loading.pop(entry.key, None)
        if not load.tickets:
            self._end(load)
        return True

    def _settle(self, ticket: Ticket, place: int, entry: Entry, is_above: bool) -> None:
        """Keeps what was read from the tier below, and forgets what is damaged.

        Args:
            is_above: as TierIndex.put has it.
        """
        shelves, is_state = self._shelves, ticket.is_state
        entry.users -= 1
        if ticket.from_below[place]:
            lower = shelves.below[is_state].get(entry.key)
            if lower is not None:
                lower.users -= 1
            if not ticket.failed[place]:
                shelves.host[is_state].put(entry, is_above)
                shelves.below[is_state].use([entry.key])
                shelves.below[is_state].tell(entry.key)
            else:
                shelves.host[is_state].give_back([entry.slot])
            is_gone = ticket.failed[place] or shelves.asks_peers
            if is_gone and lower is not None and not lower.users:
                shelves.below[is_state].drop(lower)
        elif not ticket.failed[place]:
            shelves.host[is_state].tell(entry.key)
        elif not entry.users and shelves.host[is_state].get(entry.key) is entry:
            shelves.host[is_state].drop(entry)

    def _count(self, ticket: Ticket, bytes_each: int) -> None:
        from_below = bool(ticket.from_below.any())
        num_bytes = len(ticket.entries) * bytes_each
        self._shelves.gain.loaded(num_bytes, ticket.seconds, from_below)
        counts = self._shelves.counts[from_below]
        counts.loaded_bytes += num_bytes
        counts.load_seconds += ticket.seconds
        for tier in (False, True):
            self._shelves.counts[tier].failed_loads += int((ticket.failed & (ticket.from_below == tier)).sum())

    def _take_pages(self, load: _Load, ticket: Ticket) -> int:
        """Publishes what has arrived, up to the first page that has not; gives the number of pages."""
        shelves, page_size, count = self._shelves, self._shelves.page_size, len(ticket.entries)
        self._count(ticket, shelves.copies.page_bytes)
        failed = np.flatnonzero(ticket.failed)
        good = 0 if load.has_failed else int(failed[0]) if failed.size else count
        load.has_failed |= good < count
        if good:
            start = load.num_pages * page_size
            tokens, pages = load.token_ids[start : start + good * page_size], ticket.pages[:good]
            keys = [entry.key for entry in ticket.entries[:good]]
            load.run, duplicates = self._cache.extend(load.run, tokens, pages, load.salt, keys)
            shelves.pages.allocator.free(duplicates)
            load.num_pages += good
            from_below = int(ticket.from_below[:good].sum())
            from_host, before = load.num_loaded
            load.num_loaded = from_host + good - from_below, before + from_below
            shelves.host[False].use(keys)
        shelves.pages.give_back_loaded(ticket.pages[good:])
        return good

    def _take_state(self, load: _Load, ticket: Ticket) -> None:
        self._count(ticket, self._shelves.copies.state_bytes)
        row = int(ticket.pages[0])
        if ticket.failed.any() or load.has_failed:
            self._cache.states.release(row)
        else:
            self._shelves.host[True].use([ticket.entries[0].key])
            self._shelves.pages.keep_state(load.token_ids, load.salt, row)

    def _end(self, load: _Load) -> None:
        self._cache.unlock(load.run)
        for request in load.waiting:
            self._waits.pop(request, None)
            self._tried.setdefault(request, []).append(load.num_loaded)
        self._later.clear()
        self._shelves.changes += 1


def _ticket(sources: Sequence[tuple[Entry, bool]], pages: np.ndarray, is_state: bool) -> Ticket:
    from_below = np.array([is_new for _, is_new in sources], dtype=bool)
    return Ticket("load", [entry for entry, _ in sources], pages, is_state, from_below)
