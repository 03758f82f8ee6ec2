"""Which decodes the kernel for few requests on Hopper takes, and among how many blocks a head's keys; free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mllm_compile.runtime.cuda.kernel import CudaKernel

HEAD_DIM = 128
MIN_KV_HEADS = 8  # with fewer a request has too few blocks, as below
MAX_GROUP = 8  # query heads of a KV head; half the rows of a product
SPLITS = (2, 4, 8)  # blocks of a cluster
TILE = 64  # keys that a block works at together

# About as many as there are multiprocessors. With 64 a request of 16384 tokens took 33 µs in place of split_decode's
# 25, of 4096 9 in place of 11 (docs/performance.md).
_BLOCKS = 128
MOST_TOKENS_OF_FEW_BLOCKS = 8192
# Query heads x head dim of a model whose requests may decode so alone. Qwen3-0.6B (2048) gained by it (0.682 -> 0.638
# ms a token), Qwen3-8B (4096) seems to have lost (3.95 -> 4.28, on two GPUs).
MOST_WIDTH_OF_FEW_BLOCKS = 2048
_MIN_PAGE = 16
_RING_TILES = 3  # of keys and values; two blocks on a multiprocessor
_WARPS = 4


@dataclass(frozen=True)
class ClusterKernel(CudaKernel):
    """
    Attributes:
        kv_heads: of the cache; group: query heads that share one.
        page_size: tokens of a page.
        split: blocks of a cluster, which take a head's tiles in turns.
    """

    source: ClassVar[str] = "cluster_decode/decode.cu"
    function: ClassVar[str] = "cluster_decode"
    switch: ClassVar[str] = "compile.cluster_decode: false"

    kv_heads: int
    group: int
    page_size: int
    split: int

    @property
    def name(self) -> str:
        return f"decode_{self.kv_heads}x{self.group}_page{self.page_size}_split{self.split}"

    @property
    def num_threads(self) -> int:
        return 32 * _WARPS

    @property
    def shared_bytes(self) -> int:
        """The ring and what its alignment may cost; sums of warps and of the block; barriers."""
        ring = _RING_TILES * TILE * HEAD_DIM * 2 * 2
        sums = (_WARPS + 1) * self.group * (HEAD_DIM + 2) * 4
        return ring + 1024 + sums + 2 * _RING_TILES * 8

    @property
    def box_rows(self) -> int:
        """Of a page, that are copied together."""
        return min(self.page_size, TILE)

    def constants(self) -> dict[str, int]:
        return {
            "KV_HEADS": self.kv_heads,
            "GROUP": self.group,
            "PAGE": self.page_size,
            "SPLIT": self.split,
            "STAGES": _RING_TILES,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ClusterKernel:
        return cls(**{name: value for name, value in data.items() if name != "source"})


def cluster_kernels(num_heads: int, num_kv_heads: int, page_size: int) -> tuple[ClusterKernel, ...]:
    """Those of a layer, one for each split."""
    return tuple(ClusterKernel(num_kv_heads, num_heads // num_kv_heads, page_size, split) for split in SPLITS)


def is_served(num_heads: int, num_kv_heads: int, head_dim: int, page_size: int) -> bool:
    """Whether there is a kernel for such heads and pages."""
    fits_pages = page_size % TILE == 0 or (TILE % page_size == 0 and page_size >= _MIN_PAGE)
    fits_heads = head_dim == HEAD_DIM and num_kv_heads >= MIN_KV_HEADS and num_heads // num_kv_heads <= MAX_GROUP
    return fits_pages and fits_heads


def has_few_blocks(num_sequences: int) -> bool:
    """Whether so many requests x KV heads have too few blocks to read at the memory's rate where they are long."""
    return num_sequences * SPLITS[-1] < _BLOCKS


def choose_split(num_sequences: int) -> int:
    """Blocks of each sequence's cluster: of so many requests x KV heads."""
    return next((split for split in reversed(SPLITS) if split * num_sequences <= _BLOCKS), SPLITS[0])
