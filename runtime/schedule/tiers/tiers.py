"""The memory behind the KV cache, for one scheduler: what is loaded for whom, and what is stored.

A request that waits may find more of its prompt here than the prefix cache has. Then its pages are loaded while it
waits on, and steps of others run (loads.py). A load ends as pages of the prefix cache, which the request finds there as
any other. What does not arrive is computed. Stores begin after pages are published, and lock their path meanwhile
(stores.py), or when the prefix cache is about to give pages up (room.py). Behind the host's memory there may be a tier
below, whose content comes and goes through the host's.

A load writes pages that nobody reads. They are in the cache only when the host has seen the end of the copy, so no step
that reads them was launched before. Copies start behind all that was launched (ticket.py), so no step that was planned
before writes them. The step that is being planned is not: it may not read what a load writes. Free of torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator
from functools import partial

import numpy as np

from mllm_compile.runtime.schedule.pages.page_run import PageRun, Salt
from mllm_compile.runtime.schedule.pages.tables import PageTables
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.schedule.tiers.figures import TierFigures
from mllm_compile.runtime.schedule.tiers.gain import Gain
from mllm_compile.runtime.schedule.tiers.handover import HandOver, Whereabouts
from mllm_compile.runtime.schedule.tiers.index import TierIndex
from mllm_compile.runtime.schedule.tiers.loads import Loads
from mllm_compile.runtime.schedule.tiers.room import Room
from mllm_compile.runtime.schedule.tiers.shelves import Shelves
from mllm_compile.runtime.schedule.tiers.stores import Stores
from mllm_compile.runtime.schedule.tiers.ticket import TierCopies

logger = logging.getLogger("mllm_compile.tiers")


class Tiers:
    """See the module's header. Used by the engine's thread alone.

    Args:
        pages: the scheduler's.
        copies: of the device that runs its steps.
        host: the indices of the host's memory, of pages and of states.
        secret: of the pages' keys.
        min_gain: least quotient of computing's time and loading's for which a prefix is loaded.
        below: the indices of the tier below, of pages and of states; None: there is no such tier.
        writes_through: as Stores has it, of all tiers.
        name_below: of the tier below, in figures.
        asks_below, asks_peers: as Shelves has it.
        hands_over: where other engines ask, and hold_s as HandOver has it; None: nothing is handed over.

    Attributes:
        handover: what other engines may fetch; None: nothing.
    """

    def __init__(
        self,
        pages: PageTables,
        copies: TierCopies,
        host: tuple[TierIndex, TierIndex],
        secret: bytes,
        min_gain: float = 1.0,
        below: tuple[TierIndex, TierIndex] | None = None,
        writes_through: bool = True,
        name_below: str = "disk",
        asks_below: bool = False,
        asks_peers: bool = False,
        hands_over: tuple[Whereabouts, float] | None = None,
    ) -> None:
        self._names = "host", name_below
        self._to_learn: list[tuple[ScheduledBatch, float]] = []  # steps, and what they took
        self._has_left = self._is_closed = False
        upper = {False: host[0], True: host[1]}
        lower = {} if below is None else {False: below[0], True: below[1]}
        self._shelves = Shelves(
            pages, copies, secret, Gain(min_gain), upper, lower, asks_below=asks_below, asks_peers=asks_peers
        )
        self._copies = copies
        self._stores = Stores(self._shelves, writes_through)
        self._room = None if writes_through else Room(self._shelves, self._stores)
        self._loads = Loads(self._shelves, self._room)
        self.handover = None if hands_over is None else HandOver(self._shelves, self._stores, *hands_over)
        pages.cache.watchers += [self._stores] if self._room is None else [self._stores, self._room]

    # --- requests that wait -------------------------------------------------------------------------------------------

    def is_loading(self, request: Request) -> bool:
        """True if the request waits for a load, or for room."""
        return self._loads.is_for(request) or (self._room is not None and self._room.is_for(request))

    def holds_back(
        self, request: Request, token_ids: np.ndarray, salt: Salt, num_needed: int, num_promised: int = 0
    ) -> bool:
        """True if a request is better admitted later: its pages are being loaded, or begin to be.

        Args:
            token_ids: [n] int64 that the prefix cache may have.
            num_needed: pages that it needs in all, with those to spare.
            num_promised: pages that others will take, of what is free.
        """
        return self._loads.holds_back(request, token_ids, salt, num_needed, num_promised)

    def leave(self, request: Request) -> None:
        """Notes that a request waits no longer: it was admitted, or has ended."""
        self._loads.leave(request)
        if self._room is not None:
            self._room.leave(request)

    def count_hit(self, request: Request, num_cached: int) -> tuple[int, int]:
        """Counts tokens of a request that is admitted with so many cached ones: from the host, and from below."""
        page_size = self._shelves.page_size
        pages = self._loads.pages_for(request, num_cached // page_size)
        from_host, from_below = (count * page_size for count in pages)
        self._shelves.counts[0].hit_tokens += from_host
        self._shelves.counts[1].hit_tokens += from_below
        return from_host, from_below

    # --- time goes on -------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Copies are in flight."""
        return bool(self._loads or self._stores or self._room) or self._stores.is_writing

    @property
    def has_more(self) -> bool:
        """`advance` or `begin_stores` would begin one."""
        if self._room is not None and self._room.has_more:
            return True
        return self._stores.has_more or (self.handover is not None and self.handover.has_more)

    @property
    def is_awaited(self) -> bool:
        """A store is to begin that another engine waits for."""
        return self.handover is not None and self.handover.has_more

    @property
    def changes(self) -> int:
        """Grows when pages changed hands."""
        return self._shelves.changes

    def advance(self) -> None:
        """Takes in the copies that are over, and has the cache give up what is to be free."""
        self._take_in()
        if self._room is not None:
            self._room.advance()

    @property
    def may_wait(self) -> bool:
        """Stores are better begun when no prompt is computed: beside one they take 2 % of its time (docs/lab/tiers.md).
        False where other engines wait for them, or many pages do."""
        return self.handover is None and self._stores.may_wait

    def begin_stores(self) -> None:
        """Begins to store what was published, and writes below. No step waits for that: it is for when the device is
        busy, or idle."""
        if self.handover is not None:
            self.handover.begin()
        self._stores.begin()
        self.begin_writes()
        if self.handover is not None:
            self.handover.settle()

    def begin_writes(self) -> None:
        """Begins to write below what the host's memory has, and learns from steps. Neither takes the device's time, so
        they go on beside prompts: both queues stay short while prompts come without a break."""
        for batch, ms in self._to_learn:
            self._shelves.gain.computed(batch, ms)
        self._to_learn.clear()
        self._stores.begin_writes()

    def settle(self) -> None:
        """Waits until nothing moves: then pages and memory may change hands in any way. Begins no writes below: they
        may be many, and all requests wait for this. Nor does anybody wait for room from then on."""
        if self._room is not None:
            self._room.stop()
        self._take_in()
        self._stores.begin()
        while self.is_busy:
            self._copies.wait()
            self._take_in()
            self._stores.begin()

    def store_rest(self) -> None:
        """Has the host's memory get what the prefix cache alone has and is about to lose; waits for it."""
        if self._room is not None:
            self.settle()
            for _ in self._stores.store_rest():
                self.settle()

    def _take_in(self) -> None:
        for ticket in self._copies.finished():
            if not (self._loads.over(ticket) or (self._room is not None and self._room.over(ticket))):
                self._stores.over(ticket)

    def state_kept(self, run: PageRun) -> None:
        """Has a run's state stored."""
        self._stores.state_kept(run)

    def watch(self, tell: Callable[[str, bytes, bool], None]) -> None:
        """Tells which pages tiers hold: a tier's name, a page's key, and whether it holds the page now."""
        below = {} if self._shelves.asks_peers else self._shelves.below
        for name, indices in zip(self._names, (self._shelves.host, below), strict=True):
            if indices:
                indices[False].watch = partial(tell, name)

    def clear(self) -> None:
        """Forgets all that is stored; nothing may move."""
        for index in self._shelves.indices():
            index.clear()
        if self._has_left:
            self._copies.clear_below()

    def leave_below(self) -> None:
        """Uses the tier below no more: what is computed from now on is not what it is named after. Nothing may move.
        Nor does another process find what the host's memory has."""
        self._copies.void_kept()
        if self.handover is not None:
            self.handover.close()
        self._stores.takes_writes = False
        self._has_left |= bool(self._shelves.below)
        for index in self._shelves.below.values():
            index.leave()
        self._shelves.below = {}

    def took(self, batch: ScheduledBatch, ms: float) -> None:
        """Learns what computing a prompt takes, from a step without copies beside it, in `begin_writes`."""
        if batch.num_prompt_tokens and not self._loads and not self._stores:
            self._to_learn.append((batch, ms))

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Has the end of each copy told, from any thread."""
        self._copies.wake = wake

    def read_behind(self, rows: Callable[[], Container[int]]) -> None:
        """Has loads leave rows of states alone that the step that is planned reads."""
        self._shelves.rows_to_read = rows

    def figures(self) -> tuple[TierFigures, ...]:
        """One for each tier."""
        found = []
        for name, tier, counts in zip(
            self._names, (self._shelves.host, self._shelves.below), self._shelves.counts, strict=True
        ):
            if tier:
                given = {field: getattr(counts, field) for field in counts.__dataclass_fields__}
                sizes = {"pages": len(tier[False]), "capacity": tier[False].num_slots, "states": len(tier[True])}
                evictions = sum(index.evictions for index in tier.values())
                found.append(TierFigures(name=name, **sizes, evictions=evictions, **given))
        return tuple(found)

    def close(self) -> None:
        """Ends copies for good, once or often; what the host's memory has is written below first."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.handover is not None:
            self.handover.close()
        try:
            self._copies.wait()
            self._advance_all()
            self.settle()
            self._stores.write_all(self._rounds())
            if self._room is not None and (self._shelves.below or self._copies.outlives):
                for _ in self._stores.store_rest():
                    self.settle()
                    self._stores.write_all(self._rounds())
        except Exception as error:  # of a device or a rank that is lost, and has ended the engine
            logger.warning("not all pages were stored at the end: %s", error)
        finally:
            self._copies.close()

    def _rounds(self) -> Iterator[None]:
        while True:
            yield
            self._copies.wait()
            self._advance_all()

    def _advance_all(self) -> None:
        self.advance()
        self.begin_stores()
