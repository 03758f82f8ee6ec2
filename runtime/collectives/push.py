"""Sums over ranks by kernels of ours (push.cu, send.cu, and with a norm push_norm.cu, send_norm.cu), in memory that the
ranks' GPUs see of each other.

The runtime holds the kernels; NCCL brings the handles of memory across once, and sums what they do not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence

import torch

from mllm_compile.runtime.collectives.sum_kernels import (
    BLOCKS,
    CHUNK_BYTES,
    MOST_GROUPS,
    MOST_RANKS,
    SENDING_BLOCKS,
    PushKernel,
    PushNormKernel,
    RanksKernel,
    SendKernel,
    SendNormKernel,
    SumKernel,
    most_bytes,
    most_sent_bytes,
)
from mllm_compile.runtime.cuda.driver import Argument, Kernel, address_of, load_kernel

_BUFFERS = 3
_SENT_BUFFERS = 2
NOTHING = 0x80008000  # two negative zeros
_STATE_WORDS = 2 + _BUFFERS

Summed = tuple[torch.Tensor, torch.Tensor]  # with the residual, and normed

_LOADED: dict[tuple[int, RanksKernel], Kernel] = {}  # by device index


def load_ranks_kernel(kernel: RanksKernel, binaries: Mapping[str, bytes], device: torch.device) -> None:
    """Makes this one that ranks launch on `device`.

    Raises:
        ArtifactError, DeviceError: as load_kernel.
    """
    with torch.cuda.device(device):
        _LOADED[torch.cuda.current_device(), kernel] = load_kernel(kernel, binaries)


def kernel_on(kernel: RanksKernel, device: torch.device) -> Kernel:
    """The kernel of a runtime on this device, which load_ranks_kernel has loaded."""
    return _LOADED[device.index, kernel]


def buffer_bytes(num_ranks: int) -> int:
    """Bytes of the memory that one rank receives in; all its words are NOTHING at first."""
    return _BUFFERS * num_ranks * most_bytes(num_ranks)


def sent_bytes(num_ranks: int) -> int:
    """Bytes of the memory that one rank receives sent parts in; all its words are 0 at first. 0: nothing is sent."""
    most, words = most_sent_bytes(num_ranks), MOST_GROUPS * ctypes.sizeof(ctypes.c_uint32)
    return (num_ranks - 1) * (_SENT_BUFFERS * most + words) if most else 0


class Peers(ctypes.Structure):
    """An address of each rank."""

    _fields_ = (("at", ctypes.c_uint64 * MOST_RANKS),)


class _Sums:
    """One rank's sums of a kind. All ranks sum the same sizes in the same order."""

    def __init__(self, rank: int, places: Sequence[int], device: torch.device, most: int) -> None:
        self._device = device
        self._rank, self._num_ranks = ctypes.c_int(rank), ctypes.c_int(len(places))
        self._most_bytes = most
        self._most_chunks = ctypes.c_int(most // CHUNK_BYTES)
        self._peers = Peers((ctypes.c_uint64 * MOST_RANKS)(*places))
        self._state = torch.zeros(_STATE_WORDS, dtype=torch.int32, device=device)
        self._are_gone = torch.zeros(1, dtype=torch.int32, pin_memory=True)  # the device reads it over the bus

    def takes(self, x: torch.Tensor) -> bool:
        """True if this sums x, where a runtime brought the kernel."""
        return x.nbytes <= self._most_bytes and _is_taken(x)

    def give_up(self) -> None:
        """Ends waits for ranks that are gone; from any thread."""
        self._are_gone.fill_(1)

    @property
    def _group(self) -> tuple[Argument, ...]:
        return self._peers, address_of(self._state), address_of(self._are_gone), self._rank, self._num_ranks


class PushedSums(_Sums):
    """Small sums: a rank stores into the memory of all others."""

    def __init__(
        self,
        rank: int,
        places: Sequence[int],
        device: torch.device,
        most_blocks: int = BLOCKS,
        takes_all: bool = False,
    ) -> None:
        """
        Args:
            places: the addresses on this device of each rank's memory (buffer_bytes), which their owners keep.
            most_blocks: that all run at once.
            takes_all: larger sums too, in parts.
        """
        super().__init__(rank, places, device, most_bytes(len(places)))
        self._most_blocks, self._takes_all = most_blocks, takes_all

    def takes(self, x: torch.Tensor) -> bool:
        return super().takes(x) or (self._takes_all and _is_taken(x))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of x, which `takes` allows."""
        total = torch.empty_like(x)
        if x.nbytes <= self._most_bytes:
            self._push(x, total)
        else:
            for part, there in _parts(self._most_bytes // x.itemsize, x.view(-1), total.view(-1)):
                self._push(part, there)
        return total

    def _push(self, x: torch.Tensor, total: torch.Tensor) -> None:
        chunks, kernel = x.nbytes // CHUNK_BYTES, PushKernel()
        arguments = (
            address_of(x),
            address_of(total),
            *self._group,
            ctypes.c_int(chunks),
            self._most_chunks,
        )
        kernel_on(kernel, self._device).launch(kernel.num_blocks(chunks), kernel.num_threads, arguments)

    def sum_and_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Summed:
        """The residual and the sum over ranks of x, which `takes` allows, and the RMS norm of that.

        Args:
            x, residual: [T, N]; weight: [N].
        """
        summed, normed, kernel = torch.empty_like(x), torch.empty_like(x), PushNormKernel(x.shape[1])
        for part, rest, *there in _parts(self._most_bytes // (x.shape[1] * x.itemsize), x, residual, summed, normed):
            rows = ctypes.c_int(part.shape[0]), self._most_chunks
            _launch_norm(kernel, (part, rest, weight, *there), eps, (*self._group, *rows), self._most_blocks)
        return summed, normed


class SentSums(_Sums):
    """Larger sums: a rank sends all of its own to all others, in parts if need be."""

    def __init__(
        self, rank: int, places: Sequence[int], device: torch.device, most_blocks: int = SENDING_BLOCKS
    ) -> None:
        """
        Args:
            places: the addresses on this device of each rank's memory (sent_bytes), which their owners keep.
            most_blocks: that all run at once.
        """
        super().__init__(rank, places, device, most_sent_bytes(len(places)))
        self._most_blocks = most_blocks

    def takes(self, x: torch.Tensor) -> bool:
        return _is_taken(x)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of x, which `takes` allows."""
        total, kernel = torch.empty_like(x), SendKernel()
        for part, there in _parts(self._most_numbers(kernel), x.view(-1), total.view(-1)):
            chunks = ctypes.c_int(part.nbytes // CHUNK_BYTES)
            self._launch(kernel, part, (address_of(part), address_of(there), *self._group, chunks, self._most_chunks))
        return total

    def sum_and_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Summed:
        """Returns what PushedSums.sum_and_norm does."""
        summed, normed, kernel = torch.empty_like(x), torch.empty_like(x), SendNormKernel(x.shape[1])
        most_rows = self._most_numbers(kernel) // x.shape[1]
        for part, rest, *there in _parts(most_rows, x, residual, summed, normed):
            tensors = (address_of(one) for one in (part, rest, weight, *there))
            rows = ctypes.c_int(part.shape[0]), self._most_chunks
            self._launch(kernel, part, (*tensors, ctypes.c_float(eps), *self._group, *rows))
        return summed, normed

    def _most_numbers(self, kernel: SendKernel | SendNormKernel) -> int:
        """The largest part, in numbers: of whole groups."""
        groups = min(self._most_bytes // kernel.group_bytes, MOST_GROUPS)
        return groups * kernel.group_bytes // torch.bfloat16.itemsize

    def _launch(self, kernel: SendKernel | SendNormKernel, part: torch.Tensor, arguments: Sequence[Argument]) -> None:
        groups = -(-part.nbytes // kernel.group_bytes)
        _LOADED[self._device.index, kernel].launch(min(groups, self._most_blocks), kernel.num_threads, arguments)


def _parts(most: int, *tensors: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    """The same parts of all, of up to `most` in their first dimension; mostly there is one, and no views are made."""
    return (tensors,) if len(tensors[0]) <= most else zip(*(one.split(most) for one in tensors), strict=True)


def _is_taken(x: torch.Tensor) -> bool:
    """True if x is of whole chunks, of numbers that kernels sum."""
    is_of_chunks = x.nbytes % CHUNK_BYTES == 0 and x.data_ptr() % CHUNK_BYTES == 0
    return x.dtype is torch.bfloat16 and x.nbytes > 0 and is_of_chunks


def add_and_norm(total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Summed:
    """Returns what PushedSums.sum_and_norm does, of a sum that was made otherwise, where a runtime has its kernel."""
    nowhere, zero = address_of(None), ctypes.c_int(0)
    rows = Peers(), nowhere, nowhere, zero, ctypes.c_int(1), ctypes.c_int(total.shape[0]), zero
    summed, normed = torch.empty_like(total), torch.empty_like(total)
    tensors = (total, residual, weight, summed, normed)
    _launch_norm(PushNormKernel(total.shape[1]), tensors, eps, rows, BLOCKS)
    return summed, normed


def _launch_norm(
    kernel: PushNormKernel,
    tensors: Sequence[torch.Tensor],
    eps: float,
    rest: tuple[Argument, ...],
    most_blocks: int,
) -> None:
    """Launches it on (x, residual, weight, summed, normed), and writes the last two."""
    arguments = (*map(address_of, tensors), ctypes.c_float(eps), *rest)
    launch_rows(kernel, tensors[0], arguments, most_blocks)


def launch_rows(kernel: SumKernel, x: torch.Tensor, arguments: Sequence[Argument], most_blocks: int = BLOCKS) -> None:
    """Launches a kernel whose blocks have whole rows of x [T, N] each."""
    kernel_on(kernel, x.device).launch(min(x.shape[0], most_blocks), kernel.num_threads, tuple(arguments))
