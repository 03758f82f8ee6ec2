"""The kernel of small sums over ranks, as it is compiled and launched: push.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS, CudaKernel

MOST_RANKS = 8
CHUNK_BYTES = 16
# Bytes of a sum, by the number of ranks: each rank sends all of its own to every other one, so that NCCL, which sends
# parts, is faster from some size on. Two H200s: 9 µs for 2 MiB, NCCL 33; 69 for 16 MiB, NCCL 80.
_MOST_BYTES = {2: 4 << 20, 3: 2 << 20, 4: 1 << 20}
_MOST_BYTES_OF_MORE = 512 << 10


def most_bytes(num_ranks: int) -> int:
    """The largest sum that the kernel is for."""
    return _MOST_BYTES.get(num_ranks, _MOST_BYTES_OF_MORE)


@dataclass(frozen=True)
class PushKernel(CudaKernel):
    """One for all sizes, and all numbers of ranks."""

    source: ClassVar[str] = "collectives/push.cu"
    function: ClassVar[str] = "push_sum"
    switch: ClassVar[str] = "runtime.tensor_parallel_size: 1"

    @property
    def name(self) -> str:
        return "push_sum"

    @property
    def num_threads(self) -> int:
        return 512

    @property
    def shared_bytes(self) -> int:
        return 0

    def constants(self) -> dict[str, int]:
        return {"THREADS": self.num_threads, "MOST_RANKS": MOST_RANKS}

    def num_blocks(self, chunks: int) -> int:
        """All of them run at once: a block may wait for another rank's of the same number."""
        return min(MULTIPROCESSORS, -(-chunks // self.num_threads))
