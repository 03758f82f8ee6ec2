"""Copies between the simulation's KV cache and a host's memory that end when a test's clock says so, in any order."""

from __future__ import annotations

from random import Random

import numpy as np

from mllm_compile.runtime.schedule.tiers.index import Entry
from mllm_compile.runtime.schedule.tiers.ticket import Ticket
from tests.runtime.schedule.scheduler_simulation import FakeDevice


class FakeCopies:
    """A copy reads and writes at its end, as late as it may; `fails` of the loads' pages do not arrive."""

    page_bytes, state_bytes = 64 << 20, 1 << 20
    takes_writes, share_below, outlives = True, 1.0, False

    def __init__(self, device: FakeDevice, chance: Random, ends: float = 0.5, fails: float = 0.0) -> None:
        self.device, self.chance, self.ends, self.fails = device, chance, ends, fails
        self.wake = lambda: None
        self.begun: list[Ticket] = []
        self.over: list[Ticket] = []
        self.slots: dict[tuple[bool, int], object] = {}
        self.below: dict[tuple[bool, bytes], object] = {}
        self.num_failed = self.num_loaded = self.num_below = self.num_lookups = 0

    def remove(self, entry: Entry, is_state: bool) -> None:
        self.below.pop((is_state, entry.key), None)

    def begin(self, ticket: Ticket) -> None:
        self.begun.append(ticket)
        for page in ticket.pages.tolist() if ticket.is_load else ():  # what is under load holds anything
            if ticket.is_state:
                self.device.states[page] = -3
            else:
                self.device.kv[page] = [-3] * self.device.page_size

    def void_kept(self) -> None:
        """There is no other process."""

    def clear_below(self) -> None:
        self.below.clear()

    def _is_lost(self, ticket: Ticket, place: int) -> bool:
        """True if the store below has forgotten it by itself."""
        return bool(ticket.from_below[place]) and (ticket.is_state, ticket.entries[place].key) not in self.below

    def finished(self) -> list[Ticket]:
        for ticket in list(self.begun):
            if self.chance.random() < self.ends:
                self._end(ticket)
        over, self.over = self.over, []
        return over

    def wait(self) -> None:
        for ticket in list(self.begun):
            self._end(ticket)

    def close(self) -> None:
        self.wait()

    def _end(self, ticket: Ticket) -> None:
        self.begun.remove(ticket)
        ticket.failed, ticket.seconds = np.zeros(len(ticket.entries), dtype=bool), 1e-3
        if ticket.kind == "lookup":
            ticket.failed[:] = [(ticket.is_state, entry.key) not in self.below for entry in ticket.entries]
            self.num_lookups += 1
            self.over.append(ticket)
            return
        if ticket.kind == "write":
            for entry in ticket.entries:
                self.below[ticket.is_state, entry.key] = self.slots[ticket.is_state, entry.slot]
            self.over.append(ticket)
            return
        for place, (slot, page) in enumerate(zip(ticket.slots.tolist(), ticket.pages.tolist(), strict=True)):
            memory = self.device.states if ticket.is_state else self.device.kv
            if not ticket.is_load:
                held = memory[page]
                self.slots[ticket.is_state, slot] = list(held) if isinstance(held, list) else held
            elif self.chance.random() < self.fails or self._is_lost(ticket, place):
                ticket.failed[place] = True
                self.num_failed += 1
            else:
                if ticket.from_below[place]:
                    self.slots[ticket.is_state, slot] = self.below[ticket.is_state, ticket.entries[place].key]
                    self.num_below += 1
                held = self.slots[ticket.is_state, slot]
                memory[page] = list(held) if isinstance(held, list) else held
                self.num_loaded += 1
        self.over.append(ticket)
