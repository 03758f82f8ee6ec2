"""The records of ring.py for followers on other hosts: frames over a connection each, in place of shared memory.

A frame (sealed.py) has a record. What a follower has read comes back with its beats (ranks/start.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import numpy as np

from mllm_compile.runtime.ranks.records import StepRecord, read_step, write_step
from mllm_compile.runtime.ranks.ring import LAST, PART, STEP, RingWriter
from mllm_compile.runtime.ranks.sealed import SealedConnection


class SentRing:
    """Rank 0's end of the ring of its own host, where followers are on it, and of connections to others."""

    def __init__(self, own: RingWriter | None, connections: Sequence[SealedConnection], most_bytes: int) -> None:
        """
        Args:
            connections: of the followers on other hosts.
            most_bytes: of a record.
        """
        self._own, self._connections = own, list(connections)
        self._record = bytearray(most_bytes)
        self._sent = 0
        self._beats = np.zeros(len(self._connections), dtype=np.int64)
        self._read = np.zeros(len(self._connections), dtype=np.int64)

    def write(self, record: StepRecord, check: Callable[[], None]) -> None:
        """Sends a step; as RingWriter."""
        size = write_step(memoryview(self._record), record)
        self._send(STEP, memoryview(self._record)[:size], check)
        if self._own is not None:
            self._own.write(record, check)

    def write_message(self, parts: Iterable[memoryview], check: Callable[[], None]) -> None:
        """Sends a message; as RingWriter."""
        held = [part.cast("B") for part in parts]
        for part in held:
            for start in range(0, len(part), len(self._record)):
                self._send(PART, part[start : start + len(self._record)], check)
        self._send(LAST, memoryview(b""), check)
        if self._own is not None:
            self._own.write_message(held, check)

    def _send(self, kind: int, data: memoryview, check: Callable[[], None]) -> None:
        for connection in self._connections:
            try:
                connection.send(kind, data)
            except OSError:  # the group's watcher says why
                check()
        self._sent += 1

    def end(self) -> None:
        """Says that there will be no more."""
        for connection in self._connections:
            with suppress(OSError):
                connection.send(STEP, b"")
        if self._own is not None:
            self._own.end()

    def heard(self, connection: int, num_read: int) -> None:
        """Notes a beat of a follower: it has read so many frames."""
        self._beats[connection] += 1
        self._read[connection] = num_read

    @property
    def beats(self) -> np.ndarray:
        """How often each follower has beaten; those of this host first."""
        return self._beats.copy() if self._own is None else np.concatenate([self._own.beats, self._beats])

    @property
    def is_read(self) -> bool:
        """True if all followers are done with all that was sent."""
        return bool((self._read == self._sent).all()) and (self._own is None or self._own.is_read)

    def close(self) -> None:
        """Gives the own ring up; connections are their processes'."""
        if self._own is not None:
            self._own.close()


class ReceivedRing:
    """A follower's end on another host."""

    def __init__(self, connection: SealedConnection, most_bytes: int) -> None:
        self._connection, self._most_bytes = connection, most_bytes
        self.num_read = 0

    def next(self) -> StepRecord | bytearray | None:
        """Waits for a step or a message; None: there will be none.

        Raises:
            EOFError: rank 0 is gone.
            ForgedFrameError: a frame is not rank 0's, or larger than a record may be.
            ValueError: it is of no kind.
        """
        message = bytearray()
        while True:
            kind, data = self._connection.receive(self._most_bytes)
            if kind not in (STEP, PART, LAST):
                raise ValueError(f"a frame of kind {kind}; expected {STEP} to {LAST}")
            if kind == STEP:
                return read_step(memoryview(data)) if data else None
            message += data
            if kind == LAST:
                return message
            self.done()

    def done(self) -> None:
        """Counts a frame."""
        self.num_read += 1
