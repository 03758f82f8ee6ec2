"""Slots of all ranks of one host: rank 0 reads and writes them for the tier below, which so has whole pages.

Rank 0 makes a file in memory for each rank that follows, which maps it for its slots. A page of `control` says how many
copies each has done. Rank 0 touches slots of others only when they have done all copies that were over for it: so a
value below is of all ranks, and one that is lost is lost for all.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from mllm_compile.runtime.errors import DeviceError
from mllm_compile.runtime.tiers.host_memory import file_in_memory
from mllm_compile.runtime.tiers.layout import SlotLayout
from mllm_compile.runtime.tiers.rows import HostRows

COPIES = ("store", "load")  # in the order of the control page
_WAIT_S = 120.0  # for a rank that follows
_POLL_S = 0.001
_CHECK_S = 1.0
_LINE = np.dtype([("copies", "<u8", (len(COPIES),)), ("is_open", "<u8"), ("sums", "V16"), ("rest", "V24")])


def digest_of(sums: Iterable[Mapping[str, int]]) -> bytes:
    """16 bytes that stand for the weights of a rank's models."""
    return blake2b(str([sorted(one.items()) for one in sums]).encode(), digest_size=16).digest()


class SharedSlots:
    """Rank 0's.

    Args:
        num_bytes: of a rank's slots.
        num_others: ranks that follow.

    Attributes:
        sums: of each, as digest_of has them; known once they have opened.
    """

    def __init__(self, num_bytes: int, num_others: int) -> None:
        self.sums = list[bytes]()
        self._files = [file_in_memory(size) for size in (num_others * _LINE.itemsize, *[num_bytes] * num_others)]
        self._control = _lines(self._files[0])
        self._slots = [_bytes(file) for file in self._files[1:]]
        self._is_closing = False

    @property
    def place(self) -> dict[str, Any]:
        """The files, as FollowedSlots opens them."""
        return {"process": os.getpid(), "files": self._files}

    def wait_open(self, check: Callable[[], None]) -> None:
        """Waits until all have opened, and takes their sums.

        Args:
            check: raises where a rank is lost; called once a second.

        Raises:
            DeviceError: one has not.
        """
        self._wait(lambda: bool(self._control["is_open"].all()), check)
        self.sums = [line["sums"].tobytes() for line in self._control]
        for file in self._files:
            os.close(file)

    def rows(self, layout: SlotLayout, own: torch.Tensor, start: int) -> RankedRows:
        """The slots of a layout from byte `start` on; `own` [n] uint8 are rank 0's."""
        size = layout.slot_bytes
        others = [one[start : start + own.numel()].reshape(-1, size) for one in self._slots] if size else []
        return RankedRows(layout, own, others)

    def wait_for(self, counts: Sequence[int]) -> None:
        """Waits until all have done so many copies of each kind.

        Raises:
            DeviceError: one has not.
        """
        self._wait(lambda: bool((self._control["copies"] >= np.array(counts, dtype=np.uint64)).all()), _nothing)

    def close(self) -> None:
        """Ends waits: a rank is lost, or all is over."""
        self._is_closing = True

    def _wait(self, is_over: Callable[[], bool], check: Callable[[], None]) -> None:
        end, next_check = time.monotonic() + _WAIT_S, time.monotonic() + _CHECK_S
        while not is_over():
            if self._is_closing or time.monotonic() > end:
                raise DeviceError("a rank has not done its copies for the memory of runtime.kv_offloading_size")
            if time.monotonic() > next_check:
                check()
                next_check += _CHECK_S
            time.sleep(_POLL_S)


class RankedRows(HostRows):
    """Slots of all ranks; a value below is rank 0's bytes, and the others' behind them."""

    def __init__(self, layout: SlotLayout, data: torch.Tensor, others: Sequence[np.ndarray]) -> None:
        super().__init__(layout, data)
        self._others = others

    def value_of(self, slot: int) -> memoryview:
        """See HostRows.value_of: a copy."""
        return np.concatenate([self.bytes_of(slot), *(one[slot] for one in self._others)]).data

    def buffer_of(self, slot: int) -> memoryview:
        """See HostRows.buffer_of."""
        return np.empty(self.slot_bytes * (1 + len(self._others)), dtype=np.uint8).data

    def fill(self, slot: int, value: memoryview) -> None:
        """See HostRows.fill."""
        if not self.slot_bytes:
            return
        parts = np.frombuffer(value, dtype=np.uint8).reshape(-1, self.slot_bytes)
        self.bytes_of(slot)[:] = parts[0]
        for other, part in zip(self._others, parts[1:], strict=True):
            other[slot] = part


class FollowedSlots:
    """A rank's that follows.

    Args:
        place: as rank 0 told it.
        rank: of this process.

    Attributes:
        file: the descriptor of its slots.
    """

    def __init__(self, place: Mapping[str, Any], rank: int) -> None:
        control, *files = place["files"]
        self.file = _open(place["process"], files[rank - 1])
        counts = _open(place["process"], control)
        self._line = _lines(counts)[rank - 1 : rank]
        os.close(counts)

    def opened(self, sums: bytes) -> None:
        """Tells that it maps its slots; and its sums, as digest_of has them."""
        self._line["sums"] = np.void(sums)
        self._line["is_open"] = 1

    def done(self, kind: str) -> None:
        """Counts a copy; for the thread of its kind alone."""
        self._line["copies"][0, COPIES.index(kind)] += 1


def _nothing() -> None:
    """Another thread sees whether a rank is lost."""


def _open(process: int, file: int) -> int:
    return os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)


def _lines(file: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(file, os.fstat(file).st_size, mmap.MAP_SHARED), dtype=_LINE)


def _bytes(file: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(file, os.fstat(file).st_size, mmap.MAP_SHARED), dtype=np.uint8)
