"""A ring of records in memory that ranks' processes share: rank 0 writes, each follower reads all of them in order.

A record is a step, or a part of a message between two steps, which may be longer than a record.

The memory has no name: it is there as long as a process has it open. A follower waits at an event descriptor, and takes
no processor while idle. Behind the last record is an empty one, which says that it is the end.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.ranks.records import StepRecord, read_step, write_step

_SLOTS = 8
_WORDS = 64  # of the header: a word for each rank, how many records it has read, then one for each, how often it beat
_PAGE = mmap.PAGESIZE
_HEADER_BYTES = 16  # ahead of a record: its size and its kind, int64
STEP, PART, LAST = range(3)  # kinds: the last part of a message is one of its own
_POLL_S = 0.0002


@dataclass(frozen=True)
class RingPlace:
    """The arguments by which a follower finds the ring: open descriptors of the memory and of its event, and sizes."""

    memory: int
    event: int
    slot_bytes: int
    follower: int  # from 0


class _Memory:
    def __init__(self, descriptor: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._map = mmap.mmap(descriptor, _PAGE + _SLOTS * slot_bytes)
        self.words = np.frombuffer(self._map, dtype=np.int64, count=2 * _WORDS)
        self._view = memoryview(self._map)

    def slot(self, number: int) -> memoryview:
        start = _PAGE + number % _SLOTS * self.slot_bytes
        return self._view[start : start + self.slot_bytes]

    def close(self) -> None:
        del self.words
        self._view.release()
        # A view that is still held keeps it until then.
        with contextlib.suppress(BufferError):
            self._map.close()


class RingWriter:
    """Rank 0's end."""

    def __init__(self, num_followers: int, most_bytes: int) -> None:
        """
        Args:
            most_bytes: of a record.

        Raises:
            OSError: there is no room for it.
        """
        slot_bytes = -(-(most_bytes + _HEADER_BYTES) // _PAGE) * _PAGE
        self._descriptor = os.memfd_create("mllm-ranks", os.MFD_CLOEXEC)
        self._events: list[int] = []
        try:
            os.ftruncate(self._descriptor, _PAGE + _SLOTS * slot_bytes)
            for _ in range(num_followers):
                self._events.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE))
            self._memory = _Memory(self._descriptor, slot_bytes)
        except OSError:
            self._close_descriptors()
            raise
        self._num_followers = num_followers
        self._written = 0
        self._is_closed = False

    def place(self, follower: int) -> RingPlace:
        """Where a follower finds it, if it inherits these descriptors."""
        return RingPlace(self._descriptor, self._events[follower], self._memory.slot_bytes, follower)

    def write(self, record: StepRecord, check: Callable[[], None]) -> None:
        """Writes a step for all followers.

        Args:
            check: called while followers are so far behind that there is no room; raises where they come no more.
        """
        self._publish(write_step(self._free_record(check), record), STEP)

    def write_message(self, parts: Iterable[memoryview], check: Callable[[], None]) -> None:
        """Writes a message for all followers, behind the steps that were written.

        Args:
            parts: its bytes in order; some.
            check: as of `write`.
        """
        record, filled = self._free_record(check), 0
        for part in parts:
            while part:
                if filled == len(record):
                    self._publish(filled, PART)
                    record, filled = self._free_record(check), 0
                taken = part[: len(record) - filled]
                record[filled : filled + len(taken)] = taken
                filled, part = filled + len(taken), part[len(taken) :]
        self._publish(filled, LAST)

    def end(self) -> None:
        """Writes the empty record, if there is room: a follower that is stuck is ended otherwise."""
        if not self._is_closed and self._has_room:
            self._publish(0, STEP)

    @property
    def beats(self) -> np.ndarray:
        """How often each follower has beaten."""
        return self._memory.words[_WORDS : _WORDS + self._num_followers].copy()

    @property
    def is_read(self) -> bool:
        """True if all followers are done with all that was written."""
        return self._written == int(self._read_counts.min())

    @property
    def _read_counts(self) -> np.ndarray:
        return self._memory.words[: self._num_followers]

    @property
    def _has_room(self) -> bool:
        return self._written - int(self._read_counts.min()) < _SLOTS

    def _free_record(self, check: Callable[[], None]) -> memoryview:
        """The place of the next record, without its header."""
        while not self._has_room:
            check()
            time.sleep(_POLL_S)
        return self._memory.slot(self._written)[_HEADER_BYTES:]

    def _publish(self, size: int, kind: int) -> None:
        np.frombuffer(self._memory.slot(self._written), dtype=np.int64, count=2)[:] = size, kind
        self._written += 1
        for event in self._events:
            os.eventfd_write(event, 1)

    def close(self) -> None:
        """Gives the memory up; once or often."""
        if not self._is_closed:
            self._is_closed = True
            self._memory.close()
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        for descriptor in (self._descriptor, *self._events):
            os.close(descriptor)


class RingReader:
    """A follower's end."""

    def __init__(self, place: RingPlace) -> None:
        self._memory = _Memory(place.memory, place.slot_bytes)
        self._event, self._follower = place.event, place.follower
        self._read = 0

    def next(self) -> StepRecord | bytearray | None:
        """Waits for a step or a message; None: there will be none."""
        message = bytearray()
        while True:
            os.eventfd_read(self._event)
            slot = self._memory.slot(self._read)
            size, kind = np.frombuffer(slot, dtype=np.int64, count=2).tolist()
            if not size:
                return None
            record = slot[_HEADER_BYTES : _HEADER_BYTES + size]
            if kind == STEP:
                return read_step(record)
            message += record
            if kind == LAST:
                return message
            self.done()

    def done(self) -> None:
        """Gives the room of the last record back."""
        self._read += 1
        self._memory.words[self._follower] = self._read

    def beat(self) -> None:
        """Tells that this process lives; from any thread."""
        self._memory.words[_WORDS + self._follower] += 1
