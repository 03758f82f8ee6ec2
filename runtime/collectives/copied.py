"""Sums over ranks whose parts are copied by the GPUs' copy engines: while they cross, no multiprocessor is held,
neither by a copy nor by a wait.

A rank copies its numbers, and the call's number behind them, into memory of every other one. Its stream waits for the
others' call numbers (cuStreamWaitValue32), then a kernel adds all parts (add_norm.cu). Two buffers take turns. A rank
writes into one again two calls later: it has waited for the other's number of the call between, which is copied behind
the kernel that read that buffer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from mllm_compile.runtime.collectives.push import Peers, Summed, launch_rows
from mllm_compile.runtime.collectives.sum_kernels import CHUNK_BYTES, AddNormKernel
from mllm_compile.runtime.cuda.driver import address_of, copy_bytes, wait_for_word, write_word

_BUFFERS = 2
_WORD_BYTES = 4
_ALIGNMENT = 256


def copied_bytes(num_ranks: int, most_bytes: int) -> int:
    """Bytes of the memory that one rank receives in; all its words are 0 at first."""
    return _BUFFERS * (num_ranks - 1) * _rounded(most_bytes) + num_ranks * _WORD_BYTES


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class CopiedSums:
    """One rank's sums, all queued on one stream. All ranks sum the same sizes in the same order."""

    def __init__(self, rank: int, places: Sequence[int], device: torch.device, most_bytes: int) -> None:
        """
        Args:
            places: the addresses on this device of each rank's memory (copied_bytes), which their owners keep.
            most_bytes: of a sum.
        """
        self._rank, self._places, self._device = rank, tuple(places), device
        self._most_bytes = most_bytes
        self._others = [other for other in range(len(places)) if other != rank]
        self._calls = 0
        self._number = torch.zeros(1, dtype=torch.int32, device=device)  # of the call, as it is sent
        self._side = torch.cuda.Stream(device)  # for give_up

    def takes(self, x: torch.Tensor) -> bool:
        """True if this sums x, where a runtime brought the kernel of its rows."""
        is_of_chunks = x.nbytes % CHUNK_BYTES == 0 and x.data_ptr() % CHUNK_BYTES == 0
        return x.dtype is torch.bfloat16 and 0 < x.nbytes <= self._most_bytes and is_of_chunks

    def sum_and_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Summed:
        """Returns what PushedSums.sum_and_norm does."""
        stream, device = torch._C._cuda_getCurrentRawStream(self._device.index), self._device.index
        self._calls += 1
        number = self._calls & 0xFFFFFFFF
        write_word(self._number.data_ptr(), number, stream, device)
        for other in self._others:
            copy_bytes(self._buffer(other, self._rank), x.data_ptr(), x.nbytes, stream, device)
            copy_bytes(self._word(other, self._rank), self._number.data_ptr(), _WORD_BYTES, stream, device)
        for other in self._others:
            wait_for_word(self._word(self._rank, other), number, stream, device)
        parts = Peers()
        for source in range(len(self._places)):
            parts.at[source] = x.data_ptr() if source == self._rank else self._buffer(self._rank, source)
        rest = parts, ctypes.c_int(len(self._places)), ctypes.c_int(x.shape[0])
        summed, normed = torch.empty_like(x), torch.empty_like(x)
        tensors = (address_of(one) for one in (residual, weight, summed, normed))
        launch_rows(AddNormKernel(x.shape[1]), x, (*tensors, ctypes.c_float(eps), *rest))
        return summed, normed

    def give_up(self) -> None:
        """Ends waits for ranks that are gone; from any thread. None may follow."""
        self._calls += 1  # one may be being queued just now
        for other in self._others:
            number, side = self._calls & 0xFFFFFFFF, self._side.cuda_stream
            write_word(self._word(self._rank, other), number, side, self._device.index)

    def _buffer(self, owner: int, source: int) -> int:
        """Where the owner has the numbers of `source` of this call."""
        place = (self._calls % _BUFFERS) * (len(self._places) - 1) + (source - owner - 1) % len(self._places)
        return self._places[owner] + place * _rounded(self._most_bytes)

    def _word(self, owner: int, source: int) -> int:
        """Where the owner has the number of the last call whose numbers came from `source`."""
        buffers = _BUFFERS * (len(self._places) - 1) * _rounded(self._most_bytes)
        return self._places[owner] + buffers + source * _WORD_BYTES
