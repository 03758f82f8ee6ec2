"""rows.cu: whole rows in long pieces, at all of the memory's rate; for large weights. 8 tokens.

Shape legend: as linear.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import ClassVar, NamedTuple

from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS
from mllm_compile.runtime.ops.stream_linear.linear import NORM_ROWS, LinearKind, LinearTiling, early_stages

MAX_TOKENS = 8

STEP = 32  # columns of a warp's step
_MULTIPROCESSOR_BYTES, _RESERVED_BYTES = 228 << 10, 1 << 10  # of shared memory; of that, a block's of the system
_MIN_COLUMNS = 1536
_MIN_BYTES_A_NS = 28  # as Triton's kernels
_MOST_PIECES = 12  # of a block's columns
_FEWEST_STAGES, _MOST_STAGES = 2, 8  # of a ring


class Division(NamedTuple):
    """A division of weights of up to `most_columns`; the fields are RowTiling's."""

    most_columns: int
    split: int
    clusters: int
    warps: int
    resident: int


# A warp's inputs are in registers, at most 96 of a lane. These are for Qwen3-8B at 8 tokens on an H200 the fastest of
# four to six each, alone and in a chain of a layer's kernels. All clusters run at once: 264 or 132 blocks. At one token
# on an H200 clusters of four read a weight with 4096 columns at 70 % of the rate of a sum, and one with 21504 at 82.
# Clusters of eight read it at 74, clusters of two whose blocks have a multiprocessor each at 102 (40.7 µs;
# benchmarks/kernels/stream_linears_speed.py, 957dd80).
_DIVISIONS = (
    Division(8192, 2, MULTIPROCESSORS, 8, 2),
    Division(24576, 2, MULTIPROCESSORS // 2, 16, 1),
)


@dataclass(frozen=True)
class RowTiling(LinearTiling):
    """
    Attributes:
        split: blocks of a cluster, which divide the columns.
        clusters: they take groups of rows in turns.
        warps: warps of a block.
        resident: blocks of a multiprocessor.
        piece: columns of a row in a stage.
        stages: stages of the ring, each NORM_ROWS rows.
    """

    source: ClassVar[str] = "ops/stream_linear/rows.cu"
    function: ClassVar[str] = "stream_linear"

    split: int
    clusters: int
    warps: int
    resident: int
    piece: int
    stages: int

    @cached_property
    def num_blocks(self) -> int:
        return self.clusters * self.split

    @cached_property
    def num_threads(self) -> int:
        return 32 * self.warps

    @property
    def groups(self) -> int:
        """Groups of rows of a cluster, at the most."""
        return math.ceil(self.kind.rows / NORM_ROWS / self.clusters)

    @property
    def stage_bytes(self) -> int:
        return NORM_ROWS * self.piece * 2

    @cached_property
    def shared_bytes(self) -> int:
        """Bytes of the ring; sums of warps and of the cluster's blocks, factors and barriers."""
        finished = math.ceil(self.groups / self.split)
        sums = self.warps * MAX_TOKENS * (NORM_ROWS + 4) + finished * self.split * MAX_TOKENS * NORM_ROWS
        return self.stages * self.stage_bytes + (sums + MAX_TOKENS) * 4 + (2 * self.stages + finished) * 8

    def constants(self) -> dict[str, int]:
        return {
            **self.kind.constants(),
            "SPLIT": self.split,
            "WARPS": self.warps,
            "CLUSTERS": self.clusters,
            "RESIDENT": self.resident,
            "PIECE": self.piece,
            "STAGES": self.stages,
            "EARLY_STAGES": early_stages(self.stage_bytes, self.resident),
        }


def takes(rows: int, columns: int) -> bool:
    """True if a weight [rows, columns] divides so, into pieces that read fast."""
    if not _MIN_COLUMNS <= columns <= _DIVISIONS[-1].most_columns or columns % (STEP * _division_of(columns).split):
        return False
    return _bytes_a_ns(_fastest(LinearKind(rows, columns), _division_of(columns))) >= _MIN_BYTES_A_NS


@cache
def choose(kind: LinearKind, division: Division | None = None) -> RowTiling:
    """Pieces and stages that should read the fastest, without unused stages: in the room that is left the next kernel's
    blocks load their weights meanwhile. `division` is another than that for its columns."""
    fastest = _fastest(kind, division or _division_of(kind.columns))
    pieces = math.ceil(kind.columns / fastest.split / fastest.piece)
    return replace(fastest, stages=min(fastest.stages, max(_FEWEST_STAGES, pieces * fastest.groups)))


def _fastest(kind: LinearKind, division: Division) -> RowTiling:
    """The tiling that should read the fastest; of equals the one with the most stages."""
    tilings = (tiling for count in range(1, _MOST_PIECES + 1) for tiling in _tilings(kind, division, count))
    return max(tilings, key=lambda tiling: (_bytes_a_ns(tiling), tiling.stages))


def _tilings(kind: LinearKind, division: Division, num_pieces: int) -> Iterator[RowTiling]:
    _, split, clusters, warps, resident = division
    piece = math.ceil(kind.columns / split / num_pieces / (STEP * warps)) * STEP * warps
    for stages in range(_FEWEST_STAGES, _MOST_STAGES + 1):
        tiling = RowTiling(kind, MAX_TOKENS, split, clusters, warps, resident, piece, stages)
        if fits(tiling):
            yield tiling


def fits(tiling: RowTiling) -> bool:
    """True if a multiprocessor has the shared memory for its blocks."""
    return tiling.shared_bytes <= _MULTIPROCESSOR_BYTES // tiling.resident - _RESERVED_BYTES


def _bytes_a_ns(tiling: RowTiling) -> float:
    """A model of what a multiprocessor reads, of 35 bytes a nanosecond at most.

    TMA takes 45 ns a piece however short, and a load takes 4.8 µs to arrive. For gate_up of Qwen3-8B at 8 tokens pieces
    of 1 KB took 70 µs, rings of 2 x 66 KB 55 µs, and this choice 47.
    """
    columns = tiling.kind.columns // tiling.split
    by_piece = columns * 2 / math.ceil(columns / tiling.piece) / 45
    by_ring = tiling.resident * tiling.stages * tiling.stage_bytes / 4800
    return min(by_piece, by_ring, 35.0)


def _division_of(columns: int) -> Division:
    return next(division for division in _DIVISIONS if columns <= division.most_columns)
