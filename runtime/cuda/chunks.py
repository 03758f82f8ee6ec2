"""A GPU's memory without addresses, which goes from one process to another as open descriptors.

The driver clears what a process gives back, and the next process that takes memory waits for that: 0.2 s for 115 GiB
(docs/lab/server.md). Chunks are not cleared: the process that maps one fills it before anything reads it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

CHUNK_BYTES = 1 << 30  # of each; VirtualMemory takes all but its rest in chunks


class Chunks:
    """Chunks of one device, whose owner this is. For one thread.

    Args:
        descriptors: each is a chunk.
    """

    def __init__(self, descriptors: Iterable[int] = ()) -> None:
        self._descriptors = list(descriptors)

    def __len__(self) -> int:
        return len(self._descriptors)

    def add(self, descriptor: int) -> None:
        """Takes one over."""
        self._descriptors.append(descriptor)

    def take(self) -> int | None:
        """One, which is the caller's; None: no more are there."""
        return self._descriptors.pop() if self._descriptors else None

    def take_all(self) -> list[int]:
        """All of them, which are the caller's."""
        taken, self._descriptors = self._descriptors, []
        return taken

    def close(self) -> None:
        """Gives the rest back to the device."""
        for descriptor in self.take_all():
            os.close(descriptor)
