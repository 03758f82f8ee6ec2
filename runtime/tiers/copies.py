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

from mllm_compile.runtime.schedule.tiers.ticket import Ticket
from mllm_compile.runtime.tiers.host_memory import HostMemory
from mllm_compile.runtime.tiers.layout import SlotLayout
from mllm_compile.runtime.tiers.rows import DeviceRows, HostRows, copier_on

logger = logging.getLogger("mllm_compile.tiers")

_Job = tuple[Ticket, torch.cuda.Event | None]


class SlotCopies:
    """Used by the engine's thread; as TierCopies.

    Args:
        pages, states: of the device's pools.
        num_slots, num_state_slots: of each; pages come first.

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
    ) -> None:
        self.page_bytes, self.state_bytes = pages.num_bytes, states.num_bytes
        self._device = device
        self.wake: Callable[[], None] = _nothing
        split = num_slots * pages.slot_bytes
        self._memory = HostMemory(split + num_state_slots * states.slot_bytes, device)
        data = self._memory.data
        self._places = {
            False: (DeviceRows(pages), HostRows(pages, data[:split]), 0),
            True: (DeviceRows(states), HostRows(states, data[split:]), split),
        }
        self._over: deque[Ticket] = deque()
        self._num_begun = self._num_over = 0
        self._one_is_over = threading.Condition()
        self._queues: dict[bool, SimpleQueue[_Job | None]] = {True: SimpleQueue(), False: SimpleQueue()}
        self._threads = [
            threading.Thread(target=self._run, args=(queue,), name=f"mllm-tier-{name}", daemon=True)
            for name, queue in (("load", self._queues[True]), ("store", self._queues[False]))
        ]
        for thread in self._threads:
            thread.start()

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def begin(self, ticket: Ticket) -> None:
        """See TierCopies.begin."""
        launched = None
        if self._device.type == "cuda":
            launched = torch.cuda.Event()
            launched.record(torch.cuda.current_stream(self._device))
        self._num_begun += 1
        self._queues[ticket.is_load].put((ticket, launched))

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
        self._memory.close()

    # --- the copies' threads ------------------------------------------------------------------------------------------

    def _run(self, queue: SimpleQueue[_Job | None]) -> None:
        copier = copier_on(self._device)
        while (job := queue.get()) is not None:
            ticket, launched = job
            ticket.failed = np.zeros(len(ticket.entries), dtype=bool)
            began = time.perf_counter()
            try:
                pool, slots, start = self._places[ticket.is_state]
                self._memory.wait_for(start + (int(ticket.slots.max()) + 1) * slots.slot_bytes)
                began = time.perf_counter()
                copier.begin_behind(launched)
                if ticket.is_load:
                    copier.load(pool, ticket.pages, slots, ticket.slots)
                else:
                    copier.store(pool, ticket.pages, slots, ticket.slots)
                copier.wait()
            except Exception as error:
                logger.warning("a copy of %d pages beside the steps failed: %s", len(ticket.entries), error)
                ticket.failed[:] = True
            ticket.seconds = time.perf_counter() - began
            self._over.append(ticket)
            with self._one_is_over:
                self._num_over += 1
                self._one_is_over.notify_all()
            self.wake()


def _nothing() -> None:
    """The default of `wake`."""
