"""The kernels that work over ranks, as they are compiled and launched: push.cu, those that norm what they sum, and
choose.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS, CudaKernel

MOST_RANKS = 8
CHUNK_BYTES = 16
CHUNK_NUMBERS = 8
# Bytes of a sum, by the number of ranks. Each rank sends all of its own to every other one, so NCCL, which sends parts,
# is faster from some size on. Two H200s: 9 µs for 2 MiB, NCCL 33; 69 for 16 MiB, NCCL 80.
_MOST_BYTES = {2: 4 << 20, 3: 2 << 20, 4: 1 << 20}
_MOST_BYTES_OF_MORE = 512 << 10
# Larger ones are sent, in parts of so much.
_MOST_SENT = {2: 64 << 20}
# Parts of a step copy theirs, beside each other's work. Among more GPUs each would send all of its own to every other.
_MOST_COPIED = {2: 64 << 20}
MOST_GROUPS = 1 << 14  # of a part that is sent
_GROUP_BYTES = 16 << 10
_ADDING_THREADS, _SENDING_THREADS = 512, 128
BLOCKS = 2 * MULTIPROCESSORS  # of kernels of whole rows, which all run at once
SENDING_BLOCKS = MULTIPROCESSORS
_MOST_THREADS = 640
CALLS_AROUND = 3 << 30  # after which the count of calls begins anew (peers.cuh)
MOST_CHOICES = 4096  # rows whose tokens are chosen at once
_LOGITS_OF_THREAD = 32
_OF_ALL = {"MOST_RANKS": MOST_RANKS, "CALLS_AROUND": CALLS_AROUND}  # constants of all kernels


def most_bytes(num_ranks: int) -> int:
    """The largest sum that is pushed."""
    return _MOST_BYTES.get(num_ranks, _MOST_BYTES_OF_MORE)


def most_sent_bytes(num_ranks: int) -> int:
    """The largest part of a sum that is sent; 0: none is."""
    return _MOST_SENT.get(num_ranks, 0)


def most_copied_bytes(num_ranks: int) -> int:
    """The largest sum of a part of a step that is copied; 0: none is."""
    return _MOST_COPIED.get(num_ranks, 0)


class _RanksKernel(CudaKernel):
    headers: ClassVar[tuple[str, ...]] = ("collectives/peers.cuh",)
    shared_bytes = 0

    @property
    def name(self) -> str:
        return self.function


@dataclass(frozen=True)
class PushKernel(_RanksKernel):
    """One for all sizes, and all numbers of ranks."""

    source: ClassVar[str] = "collectives/push.cu"
    function: ClassVar[str] = "push_sum"
    switch: ClassVar[str] = "runtime.tensor_parallel_size: 1"

    @property
    def num_threads(self) -> int:
        return 512

    def constants(self) -> dict[str, int]:
        return _OF_ALL | {"THREADS": self.num_threads}

    def num_blocks(self, chunks: int) -> int:
        """All of them run at once: a block may wait for another rank's of the same number."""
        return min(MULTIPROCESSORS, -(-chunks // self.num_threads))


@dataclass(frozen=True)
class _RowsKernel(_RanksKernel):
    """A kernel for rows of `columns` numbers and any number of ranks; a thread has a chunk of a row, or several."""

    columns: int
    headers: ClassVar[tuple[str, ...]] = ("collectives/peers.cuh", "collectives/rows.cuh")
    switch: ClassVar[str] = "compile.disable_passes: [fuse_rank_sums]"

    @property
    def name(self) -> str:
        return f"{self.function}_{self.columns}"

    @property
    def num_threads(self) -> int:
        chunks = self.columns // CHUNK_NUMBERS
        of_a_thread = -(-chunks // _MOST_THREADS)
        return -(-chunks // (32 * of_a_thread)) * 32

    def constants(self) -> dict[str, int]:
        return _OF_ALL | {"THREADS": self.num_threads, "COLUMNS": self.columns}


@dataclass(frozen=True)
class PushNormKernel(_RowsKernel):
    """For up to most_bytes, and for a sum that was made otherwise."""

    source: ClassVar[str] = "collectives/push_norm.cu"
    function: ClassVar[str] = "push_norm"


@dataclass(frozen=True)
class AddNormKernel(_RowsKernel):
    """For parts that have been copied, of any number."""

    source: ClassVar[str] = "collectives/add_norm.cu"
    function: ClassVar[str] = "add_norm"


@dataclass(frozen=True)
class SendKernel(_RanksKernel):
    """For all sizes, in parts of most_sent_bytes; a block stores `group_bytes` ahead of a word."""

    source: ClassVar[str] = "collectives/send.cu"
    headers: ClassVar[tuple[str, ...]] = ("collectives/peers.cuh", "collectives/send.cuh")
    function: ClassVar[str] = "send_sum"
    switch: ClassVar[str] = "runtime.tensor_parallel_size: 1"

    @property
    def group_bytes(self) -> int:
        return _GROUP_BYTES

    @property
    def num_threads(self) -> int:
        return _ADDING_THREADS + _SENDING_THREADS

    def constants(self) -> dict[str, int]:
        return _OF_ALL | {"THREADS": _ADDING_THREADS} | _sending(self.group_bytes)


@dataclass(frozen=True)
class SendNormKernel(_RowsKernel):
    """For all sizes in parts of most_sent_bytes."""

    source: ClassVar[str] = "collectives/send_norm.cu"
    headers: ClassVar[tuple[str, ...]] = ("collectives/peers.cuh", "collectives/rows.cuh", "collectives/send.cuh")
    function: ClassVar[str] = "send_norm"

    @property
    def group_bytes(self) -> int:
        rows = 2 if self.columns <= CHUNK_NUMBERS * _MOST_THREADS else 1  # a thread has two chunks of a group or more
        return rows * self.columns * CHUNK_BYTES // CHUNK_NUMBERS

    @property
    def num_threads(self) -> int:
        return super().num_threads + _SENDING_THREADS

    def constants(self) -> dict[str, int]:
        return super().constants() | {"THREADS": super().num_threads} | _sending(self.group_bytes)


@dataclass(frozen=True)
class ChooseKernel(_RanksKernel):
    """For rows with `columns` logits on each rank."""

    columns: int
    source: ClassVar[str] = "collectives/choose.cu"
    function: ClassVar[str] = "choose_token"
    switch: ClassVar[str] = "runtime.tensor_parallel_size: 1"

    @property
    def name(self) -> str:
        return f"{self.function}_{self.columns}"

    @property
    def num_threads(self) -> int:
        return 256

    def constants(self) -> dict[str, int]:
        return _OF_ALL | {"THREADS": self.num_threads, "COLUMNS": self.columns, "MOST_ROWS": MOST_CHOICES}

    def num_blocks(self, rows: int) -> int:
        return rows * -(-self.columns // (self.num_threads * _LOGITS_OF_THREAD))


def _sending(group_bytes: int) -> dict[str, int]:
    """The constants of send.cuh."""
    sizes = {"GROUP_CHUNKS": group_bytes // CHUNK_BYTES, "MOST_GROUPS": MOST_GROUPS}
    return sizes | {"SENDERS": _SENDING_THREADS}


SumKernel = PushKernel | PushNormKernel | SendKernel | SendNormKernel | AddNormKernel
RanksKernel = SumKernel | ChooseKernel
KERNELS: tuple[type[RanksKernel], ...] = (
    PushKernel,
    PushNormKernel,
    SendKernel,
    SendNormKernel,
    AddNormKernel,
    ChooseKernel,
)
