"""Copies between slots of the host's memory and files, by several threads: a drive is fast with many reads at once."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import numpy as np

from mllm_compile.runtime.schedule.tiers.index import Entry
from mllm_compile.runtime.schedule.tiers.ticket import Ticket
from mllm_compile.runtime.tiers.disk import DiskFiles, Place
from mllm_compile.runtime.tiers.rows import HostRows

logger = logging.getLogger("mllm_compile.tiers")

_READERS = 8


def place_of(entry: Entry, is_state: bool) -> Place:
    """The place of an entry's file."""
    return Place(entry.key, entry.parent, entry.first, entry.depth, is_state)


class FileCopies:
    """Used by the threads of SlotCopies, each for its own tickets."""

    def __init__(self, files: DiskFiles) -> None:
        self._files = files
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="mllm-tier-read")
        self._writers = ThreadPoolExecutor(1, thread_name_prefix="mllm-tier-write")  # in order, removals too
        self._is_broken = False  # a write failed: there will be no other

    def read(self, ticket: Ticket, slots: HostRows) -> None:
        """Reads what the tier below has into slots; notes in the ticket what failed."""
        places = np.flatnonzero(ticket.from_below).tolist()
        are_good = self._readers.map(self._read_one, repeat(ticket), repeat(slots), places)
        for place, is_good in zip(places, are_good, strict=True):
            if not is_good:
                ticket.failed[place] = True

    def _read_one(self, ticket: Ticket, slots: HostRows, place: int) -> bool:
        entry = ticket.entries[place]
        return self._files.read(place_of(entry, ticket.is_state), slots.bytes_of(entry.slot))

    def write(self, ticket: Ticket, slots: HostRows) -> None:
        """Writes slots to files; notes in the ticket what failed. Says once why."""
        ticket.failed[:] = list(self._writers.map(self._fails_to_write, repeat(ticket), repeat(slots), ticket.entries))

    def _fails_to_write(self, ticket: Ticket, slots: HostRows, entry: Entry) -> bool:
        if self._is_broken:
            return True
        try:
            self._files.write(place_of(entry, ticket.is_state), slots.bytes_of(entry.slot))
        except OSError as error:
            if not self._is_broken:
                self._is_broken = True
                logger.warning("no more is written to runtime.kv_offloading_disk_path: %s", error)
            return True
        return False

    def remove(self, entry: Entry, is_state: bool) -> None:
        """Begins to remove a file."""
        self._writers.submit(self._files.remove, place_of(entry, is_state))

    def close(self) -> None:
        """Waits for all that was begun."""
        self._readers.shutdown()
        self._writers.shutdown()
        self._files.close()
