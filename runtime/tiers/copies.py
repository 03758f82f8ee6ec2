"""Copies of pages and states between the device and slots of the host's memory, beside the steps.

Two threads copy, one to the host and one from it, so that what a request waits for is not behind what is stored. Others
ask the tier below: no request waits for another one's answer. On a GPU each has a stream of its own, whose copies are
the copy engines': no multiprocessor is held, and no graph changes. A copy starts behind what the engine's thread had
launched when it began.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np
import torch

from mllm_compile.runtime.schedule.tiers.index import Entry
from mllm_compile.runtime.schedule.tiers.ticket import Ticket
from mllm_compile.runtime.tiers.disk import DiskFiles
from mllm_compile.runtime.tiers.host_memory import HostMemory
from mllm_compile.runtime.tiers.kept import KeptSlots
from mllm_compile.runtime.tiers.layout import SlotLayout
from mllm_compile.runtime.tiers.rows import Copier, DeviceRows, HostRows, copier_on
from mllm_compile.runtime.tiers.store_copies import StoreCopies, TierStore

logger = logging.getLogger("mllm_compile.tiers")

_LOOKUPS = 8  # at once: each is a request's, and waits for others' answer

_Job = tuple[Ticket, torch.cuda.Event | None]


def _nothing() -> None:
    """Waits for nothing, and tells nobody."""


class SlotCopies:
    """Used by the engine's thread; as TierCopies.

    Args:
        pages, states: of the device's pools.
        num_slots, num_state_slots: of each; pages come first.
        store: the tier below; None: there is no such tier.
        kept: memory for the slots that outlives the process.
        is_lent, borrowed: as HostMemory has them.

    Attributes:
        wake: called when a copy is over, from another thread.
    """

    _BELOW: tuple[str, ...] = ("write", "lookup")  # kinds of tickets that a tier below takes, each with its threads

    def __init__(
        self,
        pages: SlotLayout,
        states: SlotLayout,
        num_slots: int,
        num_state_slots: int,
        device: torch.device,
        store: TierStore | None = None,
        kept: KeptSlots | None = None,
        is_lent: bool = False,
        borrowed: int | None = None,
    ) -> None:
        self.page_bytes, self.state_bytes = pages.num_bytes, states.num_bytes
        self._device = device
        self.wake: Callable[[], None] = _nothing
        split = num_slots * pages.slot_bytes
        chunks = [*pages.chunks(num_slots), *states.chunks(num_state_slots)]
        self._memory = HostMemory(chunks, device, kept, is_lent, borrowed)
        self._kept = kept
        data = self._memory.data
        self._places = {
            False: (DeviceRows(pages), HostRows(pages, data[:split]), 0),
            True: (DeviceRows(states), HostRows(states, data[split:]), split),
        }
        self._over: deque[Ticket] = deque()
        self._ended: dict[str, float] = {}  # when the last copy of each kind was over
        self._num_begun = self._num_over = 0
        self._one_is_over = threading.Condition()
        self._store = store
        self._below = None if store is None else StoreCopies(store)
        self._queues: dict[str, SimpleQueue[_Job | None]] = {
            name: SimpleQueue() for name in ("load", "store", *(() if store is None else self._BELOW))
        }
        self._threads = [
            threading.Thread(target=self._run, args=(queue,), name=f"mllm-tier-{name}", daemon=True)
            for name, queue in self._queues.items()
            for _ in range(_LOOKUPS if name == "lookup" else 1)
        ]
        for thread in self._threads:
            thread.start()

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def begin(self, ticket: Ticket) -> None:
        """See TierCopies.begin."""
        self._memory.step_s = time.monotonic()  # a rank that follows hears of copies alone
        launched = None
        if self._device.type == "cuda" and ticket.kind in ("load", "store"):
            launched = torch.cuda.Event()
            launched.record(torch.cuda.current_stream(self._device))
        if ticket.is_load and not self._memory.is_registered:
            self._memory.hurry(self._end_of(ticket))
        self._num_begun += 1
        self._queues[ticket.kind].put((ticket, launched))

    def _end_of(self, ticket: Ticket) -> int:
        """Bytes of the slots' memory up to the last one of a ticket."""
        _, slots, start = self._places[ticket.is_state]
        return start + (int(ticket.slots.max()) + 1) * slots.slot_bytes

    @property
    def file(self) -> int | None:
        """The descriptor of the slots' memory, where it is lent."""
        return self._memory.file

    @property
    def memory(self) -> np.ndarray:
        """[n] uint8, the slots' memory."""
        data: np.ndarray = self._memory.data.numpy()
        return data

    def value_of(self, slot: int, is_state: bool) -> np.ndarray:
        """[n] uint8, the bytes of a slot; for any thread. Nothing keeps them from changing."""
        return self._places[is_state][1].bytes_of(slot)

    def offset_of(self, value: np.ndarray) -> int:
        """Where in the memory a slot's bytes begin."""
        return int(value.ctypes.data) - self._memory.data.data_ptr()

    @property
    def takes_writes(self) -> bool:
        """See TierCopies.takes_writes."""
        return self._store is not None and self._store.takes_writes

    @property
    def outlives(self) -> bool:
        """See TierCopies.outlives."""
        return self._kept is not None

    @property
    def share_below(self) -> float:
        """See TierCopies.share_below."""
        return 1.0 if self._store is None else self._store.share

    def remove(self, entry: Entry, is_state: bool) -> None:
        """See TierCopies.remove."""
        if self._below is not None:
            self._below.remove(entry, is_state)

    def void_kept(self) -> None:
        """See TierCopies.void_kept."""
        if self._kept is not None:
            self._kept.void()

    def clear_below(self) -> None:
        """See TierCopies.clear_below."""
        if self._below is not None and isinstance(self._store, DiskFiles):
            self._below.call(self._store.clear)

    def finished(self) -> list[Ticket]:
        """See TierCopies.finished."""
        self._memory.step_s = time.monotonic()
        over = []
        while self._over:
            over.append(self._over.popleft())
        return over

    def wait(self) -> None:
        """See TierCopies.wait."""
        self._are_over(None)

    def _are_over(self, within_s: float | None) -> bool:
        """Waits until all copies are over, or so long; None: for ever."""
        with self._one_is_over:
            return self._one_is_over.wait_for(lambda: self._num_over == self._num_begun, within_s)

    def wait_for_tickets(self, tickets: Sequence[Ticket]) -> None:
        """Waits until these are over."""
        with self._one_is_over:
            self._one_is_over.wait_for(lambda: all(ticket.is_over for ticket in tickets))

    def close(self) -> None:
        """See TierCopies.close."""
        for name, queue in self._queues.items():
            for _ in range(_LOOKUPS if name == "lookup" else 1):
                queue.put(None)
        for thread in self._threads:
            thread.join()
        if self._below is not None:
            self._below.close()
        self._memory.close()

    # --- the copies' threads ------------------------------------------------------------------------------------------

    def _run(self, queue: SimpleQueue[_Job | None]) -> None:
        copier, flying = copier_on(self._device), deque[_Flight]()
        while True:
            try:
                job = queue.get(block=not flying)
            except Empty:
                self._land(flying.popleft())
                continue
            if job is None:
                break
            flying.append(self._take_off(copier, *job))
            while len(flying) >= copier.most:
                self._land(flying.popleft())
        while flying:
            self._land(flying.popleft())

    def _take_off(self, copier: Copier, ticket: Ticket, launched: torch.cuda.Event | None) -> _Flight:
        """Begins a copy, or does what has no copy."""
        ticket.failed = np.zeros(len(ticket.entries), dtype=bool)
        if ticket.kind not in ("load", "read"):
            ticket.from_below = np.zeros(len(ticket.entries), dtype=bool)
        flight = _Flight(ticket, time.perf_counter())
        pool, slots, _ = self._places[ticket.is_state]
        try:
            if self._below is not None and ticket.kind == "write":
                self._await_others(ticket)
                self._below.write(ticket, slots)
            elif self._below is not None and ticket.kind == "read":
                self._await_others(ticket)
                self._below.read(ticket, slots)
            elif self._below is not None and ticket.kind == "lookup":
                self._below.look_up(ticket)
            else:
                self._memory.wait_until(self._end_of(ticket))
                flight.began = time.perf_counter()
                if self._below is not None and ticket.from_below.any():
                    self._below.read(ticket, slots)
                copier.begin_behind(launched)
                try:
                    (copier.load if ticket.is_load else copier.store)(pool, ticket.pages, slots, ticket.slots)
                finally:
                    flight.wait = copier.end()  # of one that failed in its midst too: others get its pages and slots
        except Exception as error:
            flight.fail(error)
        return flight

    def _await_others(self, ticket: Ticket) -> None:
        """Waits until slots of other ranks may be touched; there are none."""

    def _land(self, flight: _Flight) -> None:
        """Waits for a copy, and tells."""
        ticket = flight.ticket
        try:
            flight.wait()
        except Exception as error:
            flight.fail(error)
        over = time.perf_counter()
        ticket.seconds = over - max(flight.began, self._ended.get(ticket.kind, 0.0))
        self._ended[ticket.kind] = over
        self._over.append(ticket)
        with self._one_is_over:
            self._num_over += 1
            ticket.is_over = True
            self._one_is_over.notify_all()
        self.wake()


@dataclass(slots=True, eq=False)
class _Flight:
    """A ticket that was begun.

    Attributes:
        began: by time.perf_counter().
        wait: waits for its end.
    """

    ticket: Ticket
    began: float
    wait: Callable[[], None] = _nothing

    def fail(self, error: Exception) -> None:
        logger.warning("a copy of %d pages beside the steps failed: %s", len(self.ticket.entries), error)
        self.ticket.failed[:] = True
