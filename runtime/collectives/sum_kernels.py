"""The kernels that work over ranks, as they are compiled and launched: push.cu, those that norm what they sum, and
choose.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS, CudaKernel

MOST_RANKS = 8
CHUNK_BYTES = 16
CHUNK_NUMBERS = 8
# Bytes of a sum, by the number of ranks: each rank sends all of its own to every other one, so that NCCL, which sends
# parts, is faster from some size on. Two H200s: 9 µs for 2 MiB, NCCL 33; 69 for 16 MiB, NCCL 80.
_MOST_BYTES = {2: 4 << 20, 3: 2 << 20, 4: 1 << 20}
_MOST_BYTES_OF_MORE = 512 << 10
# Larger ones are pulled, where they are normed. Two H200s: 48 µs for 16 MiB and 107 for 64, NCCL 80 and 195.
_MOST_PULLED = {2: 64 << 20}
# Parts of a step copy theirs, beside each other's work. Among more GPUs each would send all of its own to every other.
_MOST_COPIED = {2: 64 << 20}
MOST_GROUPS = 1 << 14  # of rows that are pulled
GROUP_ROWS = 2
BLOCKS = 2 * MULTIPROCESSORS  # of kernels of whole rows, which all run at once
_MOST_THREADS = 640
MOST_CHOICES = 4096  # rows whose tokens are chosen at once
_LOGITS_OF_THREAD = 32


def most_bytes(num_ranks: int) -> int:
    """The largest sum that is pushed."""
    return _MOST_BYTES.get(num_ranks, _MOST_BYTES_OF_MORE)


def most_pulled_bytes(num_ranks: int) -> int:
    """The largest sum that is pulled; 0: none is."""
    return _MOST_PULLED.get(num_ranks, 0)


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
        return {"THREADS": self.num_threads, "MOST_RANKS": MOST_RANKS}

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
        return {"THREADS": self.num_threads, "COLUMNS": self.columns, "MOST_RANKS": MOST_RANKS}


@dataclass(frozen=True)
class PushNormKernel(_RowsKernel):
    """For up to most_bytes, and for a sum that was made otherwise."""

    source: ClassVar[str] = "collectives/push_norm.cu"
    function: ClassVar[str] = "push_norm"


@dataclass(frozen=True)
class PullNormKernel(_RowsKernel):
    """For up to most_pulled_bytes."""

    source: ClassVar[str] = "collectives/pull_norm.cu"
    function: ClassVar[str] = "pull_norm"

    def constants(self) -> dict[str, int]:
        return super().constants() | {"MOST_GROUPS": MOST_GROUPS}


@dataclass(frozen=True)
class AddNormKernel(_RowsKernel):
    """For parts that have been copied, of any number."""

    source: ClassVar[str] = "collectives/add_norm.cu"
    function: ClassVar[str] = "add_norm"


@dataclass(frozen=True)
class ChooseKernel(_RanksKernel):
    """For rows of which each rank has `columns` logits."""

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
        sizes = {"THREADS": self.num_threads, "COLUMNS": self.columns}
        return sizes | {"MOST_ROWS": MOST_CHOICES, "MOST_RANKS": MOST_RANKS}

    def num_blocks(self, rows: int) -> int:
        return rows * -(-self.columns // (self.num_threads * _LOGITS_OF_THREAD))


SumKernel = PushKernel | PushNormKernel | PullNormKernel | AddNormKernel
RanksKernel = SumKernel | ChooseKernel
KERNELS: tuple[type[RanksKernel], ...] = (PushKernel, PushNormKernel, PullNormKernel, AddNormKernel, ChooseKernel)
