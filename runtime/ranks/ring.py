"""A ring of records in memory that ranks' processes share: rank 0 writes, each follower reads all of them in order.

The memory has no name: it is there as long as a process has it open. A follower waits at an event descriptor, and takes
no processor while idle. Behind the last record is an empty one, which says that it is the end.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.ranks.records import StepRecord, read_step, write_step

_SLOTS = 8
_WORDS = 64  # of the header: a word for each rank, how many records it has read, then one for each, how often it beat
_PAGE = mmap.PAGESIZE
_SIZE_BYTES = 8  # of a record's size, ahead of it
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
        slot_bytes = -(-(most_bytes + _SIZE_BYTES) // _PAGE) * _PAGE
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
        while self._written - int(self._read_counts.min()) >= _SLOTS:
            check()
            time.sleep(_POLL_S)
        slot = self._memory.slot(self._written)
        size = write_step(slot[_SIZE_BYTES:], record)
        np.frombuffer(slot, dtype=np.int64, count=1)[0] = size
        self._publish()

    def end(self) -> None:
        """Writes the empty record, if there is room: a follower that is stuck is ended otherwise."""
        if not self._is_closed and self._written - int(self._read_counts.min()) < _SLOTS:
            np.frombuffer(self._memory.slot(self._written), dtype=np.int64, count=1)[0] = 0
            self._publish()

    @property
    def beats(self) -> np.ndarray:
        """How often each follower has beaten."""
        return self._memory.words[_WORDS : _WORDS + self._num_followers].copy()

    @property
    def _read_counts(self) -> np.ndarray:
        return self._memory.words[: self._num_followers]

    def _publish(self) -> None:
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

    def next(self) -> StepRecord | None:
        """Waits for a record; None: there will be none."""
        os.eventfd_read(self._event)
        slot = self._memory.slot(self._read)
        size = int(np.frombuffer(slot, dtype=np.int64, count=1)[0])
        return read_step(slot[_SIZE_BYTES : _SIZE_BYTES + size]) if size else None

    def done(self) -> None:
        """Gives the last record's room back."""
        self._read += 1
        self._memory.words[self._follower] = self._read

    def beat(self) -> None:
        """Tells that this process lives; from any thread."""
        self._memory.words[_WORDS + self._follower] += 1
