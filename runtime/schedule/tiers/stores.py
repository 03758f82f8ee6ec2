"""Stores: what is published goes to the host's memory, and from there to the tier below.

Written through, it goes there soon, and others' pages for it. Written back, it goes soon into slots that are free; the
rest when the tier above is about to give it up (room.py). Free of torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from mllm_compile.runtime.schedule.pages.page_run import PageRun
from mllm_compile.runtime.schedule.tiers.index import Entry
from mllm_compile.runtime.schedule.tiers.shelves import Shelves
from mllm_compile.runtime.schedule.tiers.ticket import Ticket

_MOST_LOCKED = 0.125  # of all pages: those that stores in flight may lock
_MOST_WRITES = 2  # copies to the tier below, at once
_OLD = 0.5  # of slots: where fewer are free, the oldest that many are written below, so that they can be given up


class Stores:
    """Used by the engine's thread alone; a watcher of the prefix cache.

    Args:
        writes_through: see the module's header.
    """

    def __init__(self, shelves: Shelves, writes_through: bool) -> None:
        self._shelves, self._cache, self._writes_through = shelves, shelves.pages.cache, writes_through
        self._takes_slots = writes_through  # of others, for what is published
        self._most = max(1, int(shelves.pages.allocator.usable_pages * _MOST_LOCKED))
        self._fresh: dict[PageRun, None] = {}  # runs that were published, and are not stored
        self._num_fresh = 0  # pages that were published since stores have begun
        self._fresh_states: dict[PageRun, None] = {}
        self._stores: dict[Ticket, PageRun] = {}
        self._storing: set[bytes] = set()  # keys of pages
        self._storing_states: set[bytes] = set()
        self._to_write: dict[bool, deque[Entry]] = {False: deque(), True: deque()}
        self._writes: dict[Ticket, list[int]] = {}  # with slots of the tier below
        self._has_new: set[bool] = set()  # pages, states: what is written back later came since it was looked at
        self.takes_writes = bool(shelves.below) and not shelves.asks_peers

    def __bool__(self) -> bool:
        """Copies to the host's memory are in flight."""
        return bool(self._stores)

    @property
    def has_more(self) -> bool:
        """A store would begin now."""
        return bool(self._fresh_states) or (bool(self._fresh) and len(self._storing) < self._most)

    @property
    def may_wait(self) -> bool:
        """Fewer pages were published since the last stores than may be locked at once."""
        return self._num_fresh < self._most

    def is_storing(self, run: PageRun | None, keys: Iterable[bytes]) -> bool:
        """True while a path's pages or states are on their way to the host's memory, or wait for it.

        Args:
            run: the path's end in the prefix cache.
            keys: of its pages.
        """
        if run is not None and run in self._fresh:
            return True
        return any(key in self._storing or key in self._storing_states for key in keys)

    @property
    def is_writing(self) -> bool:
        """Copies to the tier below are in flight."""
        return bool(self._writes)

    # --- what the prefix cache tells ----------------------------------------------------------------------------------

    def stored(self, run: PageRun) -> None:
        """Has a run stored that was published."""
        self._fresh[run] = None
        self._num_fresh += run.pages.size

    def state_kept(self, run: PageRun) -> None:
        """Has a run's state stored."""
        if self._shelves.has_states:
            self._fresh_states[run] = None

    def removed(self, run: PageRun, num_kept: int) -> None:
        """Forgets a run that is gone before it was stored; takes over what sessions say of its pages."""
        if not num_kept:
            self._fresh.pop(run, None)
        self._fresh_states.pop(run, None)
        is_ended, until = bias_of(run)
        if is_ended or until:
            for index in self._shelves.indices():
                index.bias(self._shelves.keys_of(run)[num_kept:], is_ended=is_ended, until=until)

    def forgotten(self, run: PageRun) -> None:
        """Forgets all that begins like this run: it may be no numbers."""
        first = self._shelves.first_of(run)
        for index in self._shelves.indices():
            index.forget(first)
        self.cleared()

    def cleared(self) -> None:
        """Forgets what is not stored yet."""
        self._takes_slots = self._writes_through
        self._fresh.clear()
        self._fresh_states.clear()
        self._num_fresh = 0

    # --- to the host's memory -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins to store what was published, as far as it may lock pages."""
        self._num_fresh = 0
        while self._fresh and len(self._storing) < self._most:
            run = next(iter(self._fresh))
            del self._fresh[run]
            self._store_path(run)
        while self._fresh_states:
            run = next(iter(self._fresh_states))
            del self._fresh_states[run]
            self._store_state(run)

    def store_rest(self) -> Iterator[None]:
        """Has all stored that the cache alone has, what was used last behind the rest; for the cache's end. Each step
        is over when what it began is stored."""
        index = self._shelves.host[False]
        index.clear_above()
        self._takes_slots, count = True, 0
        runs = self._cache.unlocked_runs()
        for run in runs:
            index.use(self._shelves.keys_of(run))
        for run in runs:
            of_path = sum(one.pages.size for one in self._cache.path_of(run))
            if count + of_path > index.num_slots:  # a page that comes may have others of these go, and come again
                yield
                count = 0
            self._fresh[run] = None
            count += of_path
        yield

    def _store_path(self, run: PageRun) -> None:
        """Stores the pages of a path that the tier lacks."""
        shelves, index = self._shelves, self._shelves.host[False]
        missing = self._missing(run) if self._takes_slots or index.num_free else []
        for start in range(0, len(missing), shelves.piece):
            part = missing[start : start + shelves.piece]
            slots = index.take(len(part) if self._takes_slots else min(len(part), index.num_free))
            part_taken = part[: len(slots)]
            for (entry, _), slot in zip(part_taken, slots, strict=True):
                entry.slot = slot
            self._begin_store(run, [entry for entry, _ in part_taken], [page for _, page in part_taken])
            if len(slots) < len(part):
                return

    def _missing(self, run: PageRun) -> list[tuple[Entry, int]]:
        """Entries of the path's pages that the tier lacks, and the pages. It is looked at from its end up to a run that
        the tier has the end of: a path of many runs, as a load publishes it, would take long for each of them."""
        shelves, index = self._shelves, self._shelves.host[False]
        above: list[PageRun] = []
        held: Entry | None = None
        for one in self._cache.path_of(run):
            held = index.get(shelves.keys_of(one)[-1]) if above else None
            if held is not None:
                break
            above.append(one)
        first, depth = (shelves.keys_of(above[-1])[0], 0) if held is None else (held.first, held.depth)
        keys = self._cache.use_keys(shelves.secret)
        missing: list[tuple[Entry, int]] = []
        for one in reversed(above):
            parent = keys.parent_of(one)
            for key, page in zip(keys.of(one), one.pages.tolist(), strict=True):
                depth += shelves.page_size
                if key not in index and key not in self._storing:
                    missing.append((Entry(key, parent, first, depth, -1), page))
                parent = key
        return missing

    def _store_state(self, run: PageRun) -> None:
        shelves, states = self._shelves, self._shelves.host[True]
        key = shelves.keys_of(run)[-1]
        if run not in self._cache.states or key in states or key in self._storing_states:
            return
        for slot in states.take(1):
            depth = sum(one.pages.size for one in self._cache.path_of(run)) * shelves.page_size
            entry = Entry(key, b"", shelves.first_of(run), depth, slot)
            self._begin_store(run, [entry], [self._cache.states.hold(run)], is_state=True)

    def _begin_store(self, run: PageRun, entries: list[Entry], pages: list[int], is_state: bool = False) -> None:
        if not entries:
            return
        ticket = Ticket("store", entries, np.array(pages, dtype=np.int32), is_state)
        self._shelves.copies.begin(ticket)  # ahead of the rest: none waits for one that did not begin
        self._cache.lock(run)
        self._stores[ticket] = run
        (self._storing_states if is_state else self._storing).update(entry.key for entry in entries)

    def over(self, ticket: Ticket) -> None:
        """Takes a copy in that is over."""
        if ticket.kind == "write":
            self._write_over(ticket)
            return
        shelves, run = self._shelves, self._stores.pop(ticket)
        self._cache.unlock(run)
        shelves.changes += 1
        if ticket.is_state:
            self._cache.states.let_go(run)
        (self._storing_states if ticket.is_state else self._storing).difference_update(
            entry.key for entry in ticket.entries
        )
        self.take_in(ticket, is_above=not (self._writes_through or ticket.is_state))
        index = shelves.host[ticket.is_state]
        if not ticket.is_state and run not in self._stores.values():  # once, behind the path's last part
            index.use(shelves.path_keys(run))

    def take_in(self, ticket: Ticket, is_above: bool = False) -> None:
        """Lists what a copy has brought to the host's memory.

        Args:
            is_above: as TierIndex.put has it.
        """
        shelves, counts = self._shelves, self._shelves.counts[0]
        index = shelves.host[ticket.is_state]
        num_bytes = shelves.copies.state_bytes if ticket.is_state else shelves.copies.page_bytes
        counts.store_seconds += ticket.seconds
        counts.stored_bytes += num_bytes * len(ticket.entries)
        for place, entry in enumerate(ticket.entries):
            if ticket.failed[place]:
                index.give_back([entry.slot])
                continue
            entry.is_below = bool(shelves.below) and entry.key in shelves.below[ticket.is_state]
            index.put(entry, is_above)
            if self.takes_writes and not entry.is_below:
                if self._writes_through:
                    self._to_write[ticket.is_state].append(entry)
                else:
                    self._has_new.add(ticket.is_state)

    # --- to the tier below --------------------------------------------------------------------------------------------

    def begin_writes(self) -> None:
        """Begins to write what is to go below."""
        if not self.takes_writes:
            return
        for is_state, index in self._shelves.host.items():
            waiting = self._to_write[is_state]
            if not waiting and is_state in self._has_new and index.num_free < index.num_slots * _OLD:
                self._has_new.discard(is_state)
                oldest = index.oldest(max(1, int(index.num_slots * _OLD)))
                waiting += (entry for entry in oldest if not entry.is_below)
            while waiting and len(self._writes) < _MOST_WRITES:
                count = min(len(waiting), 1 if is_state else self._shelves.piece)
                self._write([waiting.popleft() for _ in range(count)], is_state)

    def write_all(self, wait: Iterable[None]) -> None:
        """Writes all that the host's memory has and the tier below has not; for the end.

        Args:
            wait: each step waits until copies are over and are taken in.
        """
        self._has_new.clear()
        for is_state, index in self._shelves.host.items():
            self._to_write[is_state] = deque(entry for entry in index if not entry.is_below)
        for _ in wait:
            if not self.takes_writes or not any(self._to_write.values()):
                return
            self.begin_writes()

    def _write(self, entries: list[Entry], is_state: bool) -> None:
        host, below = self._shelves.host[is_state], self._shelves.below[is_state]
        held = [entry for entry in entries if host.get(entry.key) is entry and entry.key not in below]
        slots = below.take(len(held), self._shelves.copies.share_below)
        held = held[: len(slots)]
        if not held:
            below.give_back(slots)
            return
        ticket = Ticket("write", held, is_state=is_state)
        self._shelves.copies.begin(ticket)
        for entry in held:
            entry.users += 1
        self._writes[ticket] = slots

    def _write_over(self, ticket: Ticket) -> None:
        shelves, below, counts = self._shelves, self._shelves.below[ticket.is_state], self._shelves.counts[1]
        num_bytes = shelves.copies.state_bytes if ticket.is_state else shelves.copies.page_bytes
        counts.store_seconds += ticket.seconds
        for place, (entry, slot) in enumerate(zip(ticket.entries, self._writes.pop(ticket), strict=True)):
            entry.users -= 1
            if ticket.failed[place]:
                below.give_back([slot])
                self.takes_writes &= shelves.copies.takes_writes
                continue
            counts.stored_bytes += num_bytes
            entry.is_below = True
            below.put(replace(entry, slot=slot, users=0))


def bias_of(run: PageRun) -> tuple[bool, float]:
    """True of a run that a session will not ask for; and the time.monotonic() up to which others go before it."""
    tag = run.tag
    if tag is None or not (tag.is_over or tag.retain_s):
        return False, 0.0
    return tag.is_over, 0.0 if tag.is_over else tag.used_s + tag.retain_s
