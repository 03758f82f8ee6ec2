"""clusters.cu: a head's keys divided among a cluster's blocks; for few requests, or verify steps. Free of torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar

from mllm_compile.runtime.attention.hopper.kernel import HEAD_DIM, DecodeKernel

SPLITS = (2, 4, 8)  # blocks of a cluster
TILE = 64  # keys that a block works at together
_MOST_ROWS = 64  # queries of a request and a KV head: each of a block's warps has sums of sixteen

# Requests x KV heads. With 16/8 heads and 32 requests of 577 tokens a layer's kernels take 46.0 µs (shares.cu 47.5,
# split_decode 54.3), with 40 55.1 (54.4, 53.6), with 16 31.9 (39.1, 36.9).
MOST_SEQUENCES = 256
# Likewise where KV heads do not divide into eights, so that blocks of shares.cu are smaller: as many clusters as run at
# once. With 32/4 heads and 32 requests of 577 tokens attention alone takes 16.0 µs (shares.cu 19.8), with 40 24.5
# (20.7).
MOST_SEQUENCES_OF_FEW_HEADS = 128
# Of all sequences' first clusters: about as many as there are multiprocessors.
SIDE_BY_SIDE = 128
# Clusters of so many blocks run side by side, two blocks on a multiprocessor, however a GPU's 132 are in groups.
_CLUSTERS = {2: 128, 4: 60, 8: 28}
# Where a request may have more, clusters serve no more sequences than this: one that is much longer than the others has
# only two blocks a head.
LONG_TOKENS = 8192
MOST_SEQUENCES_OF_LONG = 64

_RING_BYTES = 96 << 10  # of tiles of keys and values; two blocks on a multiprocessor
_WARPS = 4
_QUERY_PADDING = 8  # of a row of shared memory, as rotation.cuh has it


@dataclass(frozen=True)
class ClusterKernel(DecodeKernel):
    """
    Attributes:
        split: blocks of a cluster, which take a head's tiles in turns.
        of_source: keys are a source's: earlier steps wrote all of them.
    """

    headers: ClassVar[tuple[str, ...]] = (*DecodeKernel.headers, "attention/hopper/new_tokens.cuh")

    source: ClassVar[str] = "attention/hopper/clusters.cu"
    function: ClassVar[str] = "cluster_decode"

    split: int
    of_source: bool = field(default=False, kw_only=True)

    @property
    def name(self) -> str:
        return f"clusters_{self.heads_name}_split{self.split}" + ("_source" if self.of_source else "")

    @property
    def num_threads(self) -> int:
        return 32 * _WARPS

    @property
    def shared_bytes(self) -> int:
        """Bytes of the ring, where sums are later, and its alignment; queries, barriers and lengths."""
        queries = self.rows * (HEAD_DIM + _QUERY_PADDING) * 2
        return _RING_BYTES + 1024 + queries + 2 * self.stages * 8 + self.tokens * 4 + self.tokens % 2 * 4

    @property
    def stages(self) -> int:
        """Tiles of the ring."""
        return _RING_BYTES // (2 * TILE * self.head_bytes)

    @property
    def box_rows(self) -> int:
        """Rows of a page that one copy takes."""
        return min(self.page_size, TILE)

    def constants(self) -> dict[str, int]:
        of_cluster = {"SPLIT": self.split, "STAGES": self.stages, "OF_SOURCE": int(self.of_source)}
        return {**super().constants(), **of_cluster}


def cluster_kernels(
    num_heads: int,
    num_kv_heads: int,
    page_size: int,
    *,
    sinks: bool = False,
    fp8: bool = False,
    together: int = 1,
    tokens: int = 1,
    of_source: bool = False,
) -> tuple[ClusterKernel, ...]:
    """The kernels of a layer, one for each split; num_kv_heads: as they have them."""
    group, features = num_heads // num_kv_heads, {"sinks": sinks, "fp8": fp8, "of_source": of_source}
    return tuple(
        ClusterKernel(num_kv_heads, group, page_size, split, **features, together=together, tokens=tokens)
        for split in SPLITS
    )


def most_rows(fp8: bool) -> int:
    """Queries of a request and a KV head that are served; over keys of e4m3 a warp has sums of eight."""
    return _MOST_ROWS // 2 if fp8 else _MOST_ROWS


def choose_split(num_sequences: int, splits: Collection[int] = SPLITS) -> int:
    """Chooses the blocks of each sequence's cluster among `splits`, for so many requests x KV heads."""
    return max((split for split in splits if split * num_sequences <= SIDE_BY_SIDE), default=min(splits))


def parts_per_head(num_sequences: int, split: int) -> int:
    """The clusters that a sequence may have if it is long: all run side by side."""
    return max(1, _CLUSTERS[split] // num_sequences)


def left_words(rows: int, splits: Collection[int] = SPLITS) -> int:
    """Words of what clusters leave to others at most, of `rows` queries each: for each column two."""
    return 2 * rows * HEAD_DIM * max(_CLUSTERS[split] for split in splits)
