"""Small sums over ranks by a kernel of ours (push.cu), in memory that the ranks' GPUs see of each other.

The runtime holds the kernel; NCCL brings the handles of memory across once, and sums what is larger.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch

from mllm_compile.runtime.collectives.push_kernel import CHUNK_BYTES, MOST_RANKS, PushKernel, most_bytes
from mllm_compile.runtime.cuda.driver import Kernel, address_of, load_kernel

_BUFFERS = 3
NOTHING = 0x80008000  # two negative zeros
_STATE_WORDS = 2 + _BUFFERS

_LOADED: dict[int, tuple[PushKernel, Kernel]] = {}  # by device index


def load_push_kernel(kernel: PushKernel, binaries: Mapping[str, bytes], device: torch.device) -> None:
    """Makes this the kernel that sums launch on `device`.

    Raises:
        ArtifactError, DeviceError: as load_kernel.
    """
    with torch.cuda.device(device):
        _LOADED[torch.cuda.current_device()] = kernel, load_kernel(kernel, binaries)


def is_loaded(device: torch.device) -> bool:
    """True if a runtime on this device has the kernel."""
    return device.index in _LOADED


def new_buffers(num_ranks: int, device: torch.device) -> torch.Tensor:
    """The memory that one rank receives in, with nothing in it."""
    return torch.full((buffer_bytes(num_ranks) // 4,), NOTHING - (1 << 32), dtype=torch.int32, device=device)


def buffer_bytes(num_ranks: int) -> int:
    """Bytes of what `new_buffers` makes."""
    return _BUFFERS * num_ranks * most_bytes(num_ranks)


class _Peers(ctypes.Structure):
    _fields_ = (("at", ctypes.c_uint64 * MOST_RANKS),)


class PushedSums:
    """One rank's sums. All ranks sum the same sizes in the same order."""

    def __init__(self, rank: int, places: Sequence[int], device: torch.device) -> None:
        """
        Args:
            places: the addresses on this device of each rank's memory (new_buffers), which their owners keep.
        """
        self._kernel, self._loaded = _LOADED[device.index]
        self._rank, self._num_ranks = ctypes.c_int(rank), ctypes.c_int(len(places))
        self._most_bytes = most_bytes(len(places))
        self._most_chunks = ctypes.c_int(self._most_bytes // CHUNK_BYTES)
        self._peers = _Peers((ctypes.c_uint64 * MOST_RANKS)(*places))
        self._state = torch.zeros(_STATE_WORDS, dtype=torch.int32, device=device)
        self._are_gone = torch.zeros(1, dtype=torch.int32, pin_memory=True)  # the device reads it over the bus

    def takes(self, x: torch.Tensor) -> bool:
        """True if this sums x."""
        is_of_chunks = x.nbytes % CHUNK_BYTES == 0 and x.data_ptr() % CHUNK_BYTES == 0
        return x.dtype is torch.bfloat16 and 0 < x.nbytes <= self._most_bytes and is_of_chunks

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of x, which `takes` allows."""
        total, chunks = torch.empty_like(x), x.nbytes // CHUNK_BYTES
        arguments = (
            address_of(x),
            address_of(total),
            self._peers,
            address_of(self._state),
            address_of(self._are_gone),
            self._rank,
            self._num_ranks,
            ctypes.c_int(chunks),
            self._most_chunks,
        )
        self._loaded.launch(self._kernel.num_blocks(chunks), self._kernel.num_threads, arguments)
        return total

    def give_up(self) -> None:
        """Ends waits for ranks that are gone; from any thread."""
        self._are_gone.fill_(1)
