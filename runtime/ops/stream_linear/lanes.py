"""lanes.cu: every lane loads what it multiplies, without waiting for others; for small weights. 8 tokens.

Shape legend: as linear.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar

from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS
from mllm_compile.runtime.ops.stream_linear.linear import LinearKind, LinearTiling

MAX_TOKENS = 8

TILE_ROWS = 8  # outputs of a tile, which one sum of squares is of
_STEP = 32  # columns of a warp's step
# A warp's inputs of all steps are in registers, four of a lane for each. Of 0.6B's linears, one token: 12 warps for all
# 17.6 µs a layer, 16 16.8, 8 and (down) 12 15.5.
_LEAST_WARPS, _MOST_WARPS = 8, 16
_STEPS, _MOST_STEPS = 8, 10
_MOST_THREADS = 1024  # of a multiprocessor, with 64 registers each
_MOST_BYTES = 112 << 10  # of a block: two may be on a multiprocessor


@dataclass(frozen=True)
class LaneTiling(LinearTiling):
    """
    Attributes:
        tiles: a block's tiles of TILE_ROWS outputs.
        warps: warps of a block; they divide the columns.
    """

    source: ClassVar[str] = "ops/stream_linear/lanes.cu"
    function: ClassVar[str] = "stream_linear"

    tiles: int
    warps: int

    @cached_property
    def num_blocks(self) -> int:
        return math.ceil(_num_tiles(self.kind) / self.tiles)

    @cached_property
    def num_threads(self) -> int:
        return 32 * self.warps

    @cached_property
    def steps(self) -> int:
        """Steps of a warp."""
        return math.ceil(self.kind.columns / _STEP / self.warps)

    @cached_property
    def shared_bytes(self) -> int:
        """Bytes of the weight, and of factors."""
        parts = 2 if self.kind.gated else 1
        return self.tiles * parts * self.steps * self.num_threads * 16 + MAX_TOKENS * 4

    def constants(self) -> dict[str, int]:
        return {
            **self.kind.constants(),
            "TILES": self.tiles,
            "WARPS": self.warps,
            "RESIDENT": _MOST_THREADS // self.num_threads,
            "SHARED_BYTES": self.shared_bytes,
        }


def takes(kind: LinearKind) -> bool:
    """True if shared memory has room for all of the weight, and registers for the inputs."""
    tiling = choose(kind)
    fits = tiling.shared_bytes <= _MOST_BYTES and tiling.steps <= _MOST_STEPS
    return fits and tiling.tiles <= tiling.warps


@cache
def choose(kind: LinearKind) -> LaneTiling:
    tiles = math.ceil(_num_tiles(kind) / MULTIPROCESSORS)
    warps = math.ceil(kind.columns / _STEP / _STEPS)
    return LaneTiling(kind, MAX_TOKENS, tiles, min(max(warps, _LEAST_WARPS), _MOST_WARPS))


def _num_tiles(kind: LinearKind) -> int:
    return kind.rows // (2 if kind.gated else 1) // TILE_ROWS
