"""Copies of pages and states between the device and slots of the host's memory, beside the steps.

Two threads copy, one to the host and one from it, so that what a request waits for is not behind what is stored. On a
GPU each has a stream of its own, whose copies are the copy engines': no multiprocessor is held, and no graph changes.
A copy starts behind what the engine's thread had launched when it began.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np
import torch

from mllm_compile.runtime.schedule.tiers.index import Entry
from mllm_compile.runtime.schedule.tiers.ticket import Ticket
from mllm_compile.runtime.tiers.disk import DiskFiles
from mllm_compile.runtime.tiers.file_copies import FileCopies
from mllm_compile.runtime.tiers.host_memory import HostMemory
from mllm_compile.runtime.tiers.layout import SlotLayout
from mllm_compile.runtime.tiers.rows import Copier, DeviceRows, HostRows, copier_on

logger = logging.getLogger("mllm_compile.tiers")

_Job = tuple[Ticket, torch.cuda.Event | None]


class SlotCopies:
    """Used by the engine's thread; as TierCopies.

    Args:
        pages, states: of the device's pools.
        num_slots, num_state_slots: of each; pages come first.
        files: the tier below; None: there is no such tier.

    Attributes:
        wake: called when a copy is over, from another thread.
    """

    def __init__(
        self,
        pages: SlotLayout,
        states: SlotLayout,
        num_slots: int,
        num_state_slots: int,
        device: torch.device,
        files: DiskFiles | None = None,
    ) -> None:
        self.page_bytes, self.state_bytes = pages.num_bytes, states.num_bytes
        self._device = device
        self.wake: Callable[[], None] = _nothing
        split = num_slots * pages.slot_bytes
        self._memory = HostMemory([*pages.chunks(num_slots), *states.chunks(num_state_slots)], device)
        data = self._memory.data
        self._places = {
            False: (DeviceRows(pages), HostRows(pages, data[:split]), 0),
            True: (DeviceRows(states), HostRows(states, data[split:]), split),
        }
        self._over: deque[Ticket] = deque()
        self._num_begun = self._num_over = 0
        self._one_is_over = threading.Condition()
        self._files = None if files is None else FileCopies(files)
        self._queues: dict[str, SimpleQueue[_Job | None]] = {
            name: SimpleQueue() for name in ("load", "store", *(() if files is None else ("write",)))
        }
        self._threads = [
            threading.Thread(target=self._run, args=(queue,), name=f"mllm-tier-{name}", daemon=True)
            for name, queue in self._queues.items()
        ]
        for thread in self._threads:
            thread.start()

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def begin(self, ticket: Ticket) -> None:
        """See TierCopies.begin."""
        launched = None
        if self._device.type == "cuda" and not ticket.is_write:
            launched = torch.cuda.Event()
            launched.record(torch.cuda.current_stream(self._device))
        self._num_begun += 1
        self._queues["load" if ticket.is_load else "write" if ticket.is_write else "store"].put((ticket, launched))

    def remove(self, entry: Entry, is_state: bool) -> None:
        """See TierCopies.remove."""
        if self._files is not None:
            self._files.remove(entry, is_state)

    def finished(self) -> list[Ticket]:
        """See TierCopies.finished."""
        over = []
        while self._over:
            over.append(self._over.popleft())
        return over

    def wait(self) -> None:
        """See TierCopies.wait."""
        with self._one_is_over:
            self._one_is_over.wait_for(lambda: self._num_over == self._num_begun)

    def close(self) -> None:
        """See TierCopies.close."""
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join()
        if self._files is not None:
            self._files.close()
        self._memory.close()

    # --- the copies' threads ------------------------------------------------------------------------------------------

    def _run(self, queue: SimpleQueue[_Job | None]) -> None:
        copier = copier_on(self._device)
        while (job := queue.get()) is not None:
            ticket, launched = job
            ticket.failed = np.zeros(len(ticket.entries), dtype=bool)
            if not ticket.is_load:
                ticket.from_below = np.zeros(len(ticket.entries), dtype=bool)
            began = time.perf_counter()
            try:
                _, slots, start = self._places[ticket.is_state]
                if not ticket.is_write:
                    self._memory.wait_for(start + (int(ticket.slots.max()) + 1) * slots.slot_bytes)
                began = time.perf_counter()
                self._copy(copier, ticket, launched)
            except Exception as error:
                logger.warning("a copy of %d pages beside the steps failed: %s", len(ticket.entries), error)
                ticket.failed[:] = True
            ticket.seconds = time.perf_counter() - began
            self._over.append(ticket)
            with self._one_is_over:
                self._num_over += 1
                self._one_is_over.notify_all()
            self.wake()

    def _copy(self, copier: Copier, ticket: Ticket, launched: torch.cuda.Event | None) -> None:
        pool, slots, _ = self._places[ticket.is_state]
        if self._files is not None and ticket.is_write:
            self._files.write(ticket, slots)
            return
        if self._files is not None and ticket.from_below.any():
            self._files.read(ticket, slots)
        copier.begin_behind(launched)
        try:
            if ticket.is_load:
                copier.load(pool, ticket.pages, slots, ticket.slots)
            else:
                copier.store(pool, ticket.pages, slots, ticket.slots)
        finally:
            copier.wait()  # one that failed in its midst too: others get its pages and slots


def _nothing() -> None:
    """The default of `wake`."""
