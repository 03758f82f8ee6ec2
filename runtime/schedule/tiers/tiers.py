"""The memory behind the KV cache, for one scheduler: what is loaded for whom, and what is stored.

A request that waits may find more of its prompt here than the prefix cache has. Then its pages are loaded while it
waits on, and steps of others run. A load ends as pages of the prefix cache, which the request finds there as any other.
What does not arrive is computed. Stores begin when pages are published, and lock their path meanwhile.

A load writes pages that nobody reads. They are in the cache only when the host has seen the end of the copy, so no step
that reads them was launched before. Copies start behind all that was launched (ticket.py), so no step that was planned
before writes them. The step that is being planned is not: it may not read what a load writes. Free of torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

import numpy as np

from mllm_compile.runtime.schedule.pages.page_run import PageRun, Salt
from mllm_compile.runtime.schedule.pages.tables import PageTables
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.schedule.tiers.figures import TierFigures
from mllm_compile.runtime.schedule.tiers.gain import Gain
from mllm_compile.runtime.schedule.tiers.index import Entry, TierIndex
from mllm_compile.runtime.schedule.tiers.ticket import Ticket, TierCopies

_PIECE_BYTES = 128 << 20  # of a copy: its pages can be read when all of it has arrived
_MOST_LOADS = 2  # at once: they share the link
_MOST_STORED = 0.125  # of all pages: those that stores in flight may lock


@dataclass(slots=True, eq=False)
class _Load:
    """A load in flight.

    Attributes:
        token_ids: [n * page_size] int64, of the whole path by the prefix cache's keys.
        run: the locked end of the path that is in the prefix cache.
        num_pages: pages of that path.
        tickets: the copies, in the order of the path; the state's is the last.
        waiting: requests that wait for it.
    """

    token_ids: np.ndarray
    salt: Salt
    run: PageRun | None
    num_pages: int
    tickets: deque[Ticket] = field(default_factory=deque)
    done: set[Ticket] = field(default_factory=set)
    waiting: set[Request] = field(default_factory=set)
    num_loaded: int = 0
    has_failed: bool = False


class Tiers:
    """See the module's header. Used by the engine's thread alone.

    Args:
        pages: the scheduler's.
        copies: of the device that runs its steps.
        num_slots, num_state_slots: pages and states that the host's memory holds.
        secret: of the pages' keys.
        min_gain: least quotient of computing's time and loading's for which a prefix is loaded.

    Attributes:
        changes: grows when pages changed hands.
        rows_to_read: gives rows of states that the step that is planned will read; a load begins before it.
    """

    def __init__(
        self,
        pages: PageTables,
        copies: TierCopies,
        num_slots: int,
        num_state_slots: int,
        secret: bytes,
        min_gain: float = 1.0,
    ) -> None:
        self._pages, self._cache, self._copies = pages, pages.cache, copies
        self._keys = pages.cache.use_keys(secret)
        self._index, self._states = TierIndex(num_slots), TierIndex(num_state_slots)
        self._gain = Gain(min_gain, copies.page_bytes)
        self._piece = max(1, _PIECE_BYTES // max(copies.page_bytes, 1 << 10))
        self._most_stored = max(1, int(pages.allocator.usable_pages * _MOST_STORED))
        self._fresh: dict[PageRun, None] = {}  # runs that were published, and are not stored
        self._fresh_states: dict[PageRun, None] = {}
        self._stores: dict[Ticket, PageRun] = {}
        self._storing: set[bytes] = set()  # keys of pages
        self._num_storing = 0
        self._loads: dict[Ticket, _Load] = {}
        self._loading: dict[bytes, _Load] = {}  # by the keys of the pages that are on their way
        self._waits: dict[Request, _Load] = {}
        self._tried: dict[Request, int] = {}  # requests that have waited: pages that were loaded for them
        self._hit_tokens = self._failed = self._loaded = self._stored = 0
        self._load_seconds = self._store_seconds = 0.0
        self.changes = 0
        self.rows_to_read: Callable[[], Container[int]] = tuple
        pages.cache.watchers.append(self)

    # --- what the prefix cache tells ----------------------------------------------------------------------------------

    def stored(self, run: PageRun) -> None:
        """Has a run stored that was published."""
        self._fresh[run] = None

    def removed(self, run: PageRun, num_kept: int) -> None:
        """Forgets a run that is gone before it was stored."""
        if not num_kept:
            self._fresh.pop(run, None)
        self._fresh_states.pop(run, None)

    def forgotten(self, run: PageRun) -> None:
        """Forgets all that begins like this run: it may be no numbers."""
        first = self._first_of(run)
        self._index.forget(first)
        self._states.forget(first)
        self._forget_fresh()

    def cleared(self) -> None:
        """Forgets what is not stored yet."""
        self._forget_fresh()

    def _forget_fresh(self) -> None:
        self._fresh.clear()
        self._fresh_states.clear()

    def state_kept(self, run: PageRun) -> None:
        """Has a run's state stored."""
        if self._states.num_slots:
            self._fresh_states[run] = None

    # --- requests that wait -------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Copies are in flight."""
        return bool(self._loads or self._stores)

    def is_loading(self, request: Request) -> bool:
        """True if the request waits for a load."""
        return request in self._waits

    def holds_back(self, request: Request, token_ids: np.ndarray, salt: Salt, num_needed: int) -> bool:
        """True if a request is better admitted later: its pages are being loaded, or begin to be.

        Args:
            token_ids: [n] int64 that the prefix cache may have.
            num_needed: pages that it needs in all, with those to spare.
        """
        if request in self._waits:
            return True
        if request in self._tried:
            return False
        page_size = self._pages.page_size
        run, pages = self._cache.match_prefix(token_ids, salt)
        have, known = pages.size, self._path_keys(run)
        parent = known[-1] if known else self._keys.root(salt)
        first_missing = self._keys.chain(parent, token_ids[have * page_size : (have + 1) * page_size])
        on_its_way = self._loading.get(first_missing[0]) if first_missing else None
        if on_its_way is not None:
            self._waits[request] = on_its_way
            on_its_way.waiting.add(request)
            return True
        found = first_missing and first_missing[0] in self._index
        if not found and not self._states.num_slots:
            return False
        if len(set(self._loads.values())) >= _MOST_LOADS:
            return bool(found)
        keys = self._keys.chain(parent, token_ids[have * page_size :]) if found else []
        entries = self._index.run_of(keys)
        state, depth = self._best_state(run, known, entries)
        if depth is not None:
            del entries[max(0, depth - have) :]
        if not entries and state is None:
            return False
        end = have + len(entries) if depth is None else depth
        cached = have if depth is None else self._state_depth(run)
        if not self._gain.pays(cached * page_size, end * page_size, len(entries) * self._copies.page_bytes):
            return False
        return self._begin_load(request, token_ids[: end * page_size], salt, entries, state, num_needed - have)

    def leave(self, request: Request) -> None:
        """Notes that a request waits no longer: it was admitted, or has ended."""
        self._tried.pop(request, None)
        load = self._waits.pop(request, None)
        if load is not None:
            load.waiting.discard(request)

    def tokens_loaded_for(self, request: Request) -> int:
        """Tokens that were loaded for a request that is being admitted."""
        return self._tried.get(request, 0) * self._pages.page_size

    def _path_keys(self, run: PageRun | None) -> list[bytes]:
        """The keys of all pages of a path."""
        runs = list(self._cache.path_of(run))
        return [key for one in reversed(runs) for key in self._keys.of(one)]

    def _first_of(self, run: PageRun) -> bytes:
        """The key of a path's first page."""
        return self._keys.of(list(self._cache.path_of(run))[-1])[0]

    def _state_depth(self, run: PageRun | None) -> int:
        """Pages of the path up to its last state that the prefix cache has."""
        depths, total = [], 0
        for one in reversed(list(self._cache.path_of(run))):
            total += one.pages.size
            if one in self._cache.states:
                depths.append(total)
        return depths[-1] if depths else 0

    def _best_state(
        self, run: PageRun | None, known: Sequence[bytes], entries: Sequence[Entry]
    ) -> tuple[Entry | None, int | None]:
        """The deepest state to be loaded, and the pages before it; (None, None) of a model that has none."""
        if not self._states.num_slots:
            return None, None
        keys = [*known, *(entry.key for entry in entries)]
        least = self._state_depth(run)
        for depth in range(len(keys), least, -1):
            state = self._states.get(keys[depth - 1])
            if state is not None:
                return state, depth
        return None, least

    # --- loads --------------------------------------------------------------------------------------------------------

    def _begin_load(
        self,
        request: Request,
        token_ids: np.ndarray,
        salt: Salt,
        entries: list[Entry],
        state: Entry | None,
        num_needed: int,
    ) -> bool:
        """Begins to load what a request's path lacks; False: others need the memory.

        Args:
            num_needed: pages that the request needs besides those that are cached.
        """
        run, had = self._cache.match_prefix(token_ids, salt)
        self._cache.lock(run)
        row = None
        if num_needed <= self._pages.available_pages and state is not None:
            row = self._cache.states.reserve(but_not=self.rows_to_read())
        if num_needed > self._pages.available_pages or (state is not None and row is None):
            self._cache.unlock(run)
            return False
        load = _Load(token_ids, salt, run, had.size)
        pages = self._pages.take_for_load(len(entries))
        for start in range(0, len(entries), self._piece):
            part = entries[start : start + self._piece]
            load.tickets.append(Ticket(True, part, pages[start : start + len(part)]))
        if state is not None and row is not None:
            load.tickets.append(Ticket(True, [state], np.array([row], dtype=np.int32), is_state=True))
        load.waiting.add(request)
        self._waits[request] = load
        self._loading |= {entry.key: load for entry in entries}
        for ticket in load.tickets:
            self._loads[ticket] = load
            for entry in ticket.entries:
                entry.users += 1
            self._copies.begin(ticket)
        return True

    def _load_over(self, ticket: Ticket) -> None:
        load = self._loads.pop(ticket)
        load.done.add(ticket)
        for entry in ticket.entries:
            entry.users -= 1
            self._loading.pop(entry.key, None)
        while load.tickets and load.tickets[0] in load.done:
            first = load.tickets.popleft()
            if first.is_state:
                self._take_state(load, first)
            else:
                self._take_pages(load, first)
        if not load.tickets:
            self._end_load(load)

    def _take_pages(self, load: _Load, ticket: Ticket) -> None:
        """Publishes what has arrived, up to the first page that has not."""
        page_size, count = self._pages.page_size, len(ticket.entries)
        num_bytes = count * self._copies.page_bytes
        self._gain.loaded(num_bytes, ticket.seconds)
        self._loaded += num_bytes
        self._load_seconds += ticket.seconds
        failed = np.flatnonzero(ticket.failed)
        if failed.size:
            self._failed += failed.size
            for place in failed.tolist():
                self._drop(self._index, ticket.entries[place])
        good = 0 if load.has_failed else int(failed[0]) if failed.size else count
        load.has_failed |= good < count
        if good:
            start = load.num_pages * page_size
            tokens, pages = load.token_ids[start : start + good * page_size], ticket.pages[:good]
            load.run, duplicates = self._cache.extend(load.run, tokens, pages, load.salt)
            self._pages.allocator.free(duplicates)
            load.num_pages += good
            load.num_loaded += good
            self._index.use([entry.key for entry in ticket.entries[:good]])
        self._pages.give_back_loaded(ticket.pages[good:])

    def _take_state(self, load: _Load, ticket: Ticket) -> None:
        state, row = ticket.entries[0], int(ticket.pages[0])
        self._loaded += self._copies.state_bytes
        self._load_seconds += ticket.seconds
        if ticket.failed.any():
            self._failed += 1
            self._drop(self._states, state)
        if ticket.failed.any() or load.has_failed:
            self._cache.states.release(row)
        else:
            self._states.use([state.key])
            self._pages.keep_state(load.token_ids, load.salt, row)

    def _end_load(self, load: _Load) -> None:
        self._cache.unlock(load.run)
        for request in load.waiting:
            self._waits.pop(request, None)
            self._tried[request] = load.num_loaded
        self.changes += 1

    def _drop(self, index: TierIndex, entry: Entry) -> None:
        """Forgets an entry that was damaged."""
        if index.get(entry.key) is entry and not entry.users:
            index.drop(entry)

    # --- stores -------------------------------------------------------------------------------------------------------

    def begin_stores(self) -> None:
        """Begins to store what was published, as far as it may lock pages."""
        while self._fresh and self._num_storing < self._most_stored:
            run = next(iter(self._fresh))
            del self._fresh[run]
            self._store_path(run)
        while self._fresh_states:
            run = next(iter(self._fresh_states))
            del self._fresh_states[run]
            self._store_state(run)

    def _store_path(self, run: PageRun) -> None:
        """Stores the pages of a path that the tier lacks."""
        above: list[PageRun] = []
        for one in self._cache.path_of(run):
            if above and self._keys.of(one)[-1] in self._index:
                break
            above.append(one)
        depth = sum(one.pages.size for one in self._cache.path_of(run)) - sum(one.pages.size for one in above)
        first = self._first_of(run)
        missing: list[tuple[Entry, int]] = []
        for one in reversed(above):
            parent = self._keys.parent_of(one)
            for key, page in zip(self._keys.of(one), one.pages.tolist(), strict=True):
                depth += 1
                if key not in self._index and key not in self._storing:
                    missing.append((Entry(key, parent, first, depth * self._pages.page_size, -1), page))
                parent = key
        for start in range(0, len(missing), self._piece):
            part = missing[start : start + self._piece]
            slots = self._index.take(len(part))
            for (entry, _), slot in zip(part, slots, strict=False):
                entry.slot = slot
            self._begin_store(run, [entry for entry, _ in part[: len(slots)]], [page for _, page in part])
            if len(slots) < len(part):
                return

    def _store_state(self, run: PageRun) -> None:
        key = self._keys.of(run)[-1]
        if run not in self._cache.states or key in self._states:
            return
        for slot in self._states.take(1):
            depth = sum(one.pages.size for one in self._cache.path_of(run)) * self._pages.page_size
            entry = Entry(key, b"", self._first_of(run), depth, slot)
            self._begin_store(run, [entry], [self._cache.states.hold(run)], is_state=True)

    def _begin_store(self, run: PageRun, entries: list[Entry], pages: list[int], is_state: bool = False) -> None:
        if not entries:
            return
        ticket = Ticket(False, entries, np.array(pages[: len(entries)], dtype=np.int32), is_state)
        self._cache.lock(run)
        self._stores[ticket] = run
        if not is_state:
            self._num_storing += len(entries)
            self._storing.update(entry.key for entry in entries)
        self._copies.begin(ticket)

    def _store_over(self, ticket: Ticket) -> None:
        run = self._stores.pop(ticket)
        self._cache.unlock(run)
        self.changes += 1
        self._store_seconds += ticket.seconds
        index = self._states if ticket.is_state else self._index
        if ticket.is_state:
            self._cache.states.let_go(run)
            self._stored += self._copies.state_bytes
        else:
            self._num_storing -= len(ticket.entries)
            self._storing.difference_update(entry.key for entry in ticket.entries)
            self._stored += len(ticket.entries) * self._copies.page_bytes
        for place, entry in enumerate(ticket.entries):
            if ticket.failed.size and ticket.failed[place]:
                index.give_back([entry.slot])
            else:
                index.put(entry)
        if not ticket.is_state:
            index.use(self._path_keys(run))

    # --- time goes on -------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Takes in the copies that are over, and begins stores."""
        for ticket in self._copies.finished():
            if ticket in self._loads:
                self._load_over(ticket)
            else:
                self._store_over(ticket)
        if self._fresh or self._fresh_states:
            self.begin_stores()

    def settle(self) -> None:
        """Waits until nothing moves: then pages and memory may change hands in any way."""
        while self.is_busy:
            self._copies.wait()
            self.advance()

    def clear(self) -> None:
        """Forgets all that is stored; nothing may move."""
        self._index.clear()
        self._states.clear()

    def took(self, batch: ScheduledBatch, ms: float) -> None:
        """Learns what computing a prompt takes, from a step without copies beside it."""
        if not self.is_busy:
            self._gain.computed(batch, ms)

    def count_hit(self, num_tokens: int) -> None:
        """Counts tokens of a prompt that came from the tier."""
        self._hit_tokens += num_tokens

    def figures(self) -> tuple[TierFigures, ...]:
        """One for each tier."""
        return (
            TierFigures(
                name="host",
                pages=len(self._index),
                capacity=self._index.num_slots,
                states=len(self._states),
                hit_tokens=self._hit_tokens,
                loaded_bytes=self._loaded,
                stored_bytes=self._stored,
                load_seconds=self._load_seconds,
                store_seconds=self._store_seconds,
                evictions=self._index.evictions + self._states.evictions,
                failed_loads=self._failed,
            ),
        )

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Has the end of each copy told, from any thread."""
        self._copies.wake = wake

    def close(self) -> None:
        """Ends copies for good."""
        self._copies.close()
