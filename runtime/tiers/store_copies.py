"""Copies between slots of the host's memory and a store, by several threads: one is fast with many calls at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, runtime_checkable

import numpy as np

from mllm_compile.runtime.sampling.transfer_params import KVTransferParams
from mllm_compile.runtime.schedule.tiers.index import Entry
from mllm_compile.runtime.schedule.tiers.ticket import Ticket
from mllm_compile.runtime.tiers.connector import KVConnector
from mllm_compile.runtime.tiers.place import Place
from mllm_compile.runtime.tiers.rows import HostRows

_READERS = 8


class TierStore(KVConnector, Protocol):
    """A store, and whether it is in use.

    Attributes:
        takes_writes: False: it is not used any more.
        share: the part of it that is left to this engine.
    """

    @property
    def takes_writes(self) -> bool: ...

    @property
    def share(self) -> float: ...


@runtime_checkable
class AsksEngines(Protocol):
    """A store of what other engines have; each request names one."""

    def lookup_at(self, source: KVTransferParams, places: Sequence[Place]) -> Sequence[bool]:
        """Tells which values that engine has; see KVConnector.lookup."""


class StoreCopies:
    """Used by the threads of SlotCopies, each for its own tickets."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="mllm-tier-read")
        self._writers = ThreadPoolExecutor(1, thread_name_prefix="mllm-tier-write")  # in order, removals too

    def look_up(self, ticket: Ticket) -> None:
        """Asks which entries the store has; notes in the ticket what it has not."""
        places = _places(ticket.entries, ticket.is_state)
        if ticket.source is not None and isinstance(self._store, AsksEngines):
            found = self._store.lookup_at(ticket.source, places)
        else:
            found = self._store.lookup(places)
        ticket.failed[:] = [not is_there for is_there in found]

    def read(self, ticket: Ticket, slots: HostRows) -> None:
        """Reads what the store has into slots; notes in the ticket what failed."""
        wanted = np.flatnonzero(ticket.from_below)
        parts = np.array_split(wanted, min(_READERS, wanted.size))
        calls = [self._readers.submit(self._read, ticket, part.tolist(), slots) for part in parts]
        for part, call in zip(parts, calls, strict=True):
            ticket.failed[part] = call.result()

    def _read(self, ticket: Ticket, which: Sequence[int], slots: HostRows) -> list[bool]:
        """Reads some entries of a ticket; True of those that failed."""
        entries = [ticket.entries[one] for one in which]
        buffers = [slots.buffer_of(entry.slot) for entry in entries]
        loaded = self._store.load(_places(entries, ticket.is_state), buffers)
        for entry, buffer, is_good in zip(entries, buffers, loaded, strict=True):
            if is_good:
                slots.fill(entry.slot, buffer)
        return [not is_good for is_good in loaded]

    def write(self, ticket: Ticket, slots: HostRows) -> None:
        """Writes slots to the store; notes in the ticket what failed."""
        values = [slots.value_of(entry.slot) for entry in ticket.entries]
        places = _places(ticket.entries, ticket.is_state)
        stored = self._writers.submit(self._store.store, places, values).result()
        ticket.failed[:] = [not is_there for is_there in stored]

    def remove(self, entry: Entry, is_state: bool) -> None:
        """Begins to remove a value."""
        self._writers.submit(self._store.remove, [Place.of_entry(entry, is_state)])

    def call(self, function: Callable[[], None]) -> None:
        """Begins a call behind all writes."""
        self._writers.submit(function)

    def close(self) -> None:
        """Waits for all that was begun."""
        self._readers.shutdown()
        self._writers.shutdown()
        self._store.close()


def _places(entries: Sequence[Entry], is_state: bool) -> list[Place]:
    return [Place.of_entry(entry, is_state) for entry in entries]
