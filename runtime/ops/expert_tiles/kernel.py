"""Divides the products of experts with many rows among the multiprocessors, for tiles.cu.

Shape legend: N rows (of a gated weight gates, then ups) and K columns of an expert's weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS
from mllm_compile.runtime.cuda.units import TILE_COST, TILE_UNITS, UNIT_ROWS, UnitsKernel

BLOCK = UNIT_ROWS * TILE_UNITS  # rows of an expert in a tile, at most
_OUTPUTS_UNIT, _INPUTS_UNIT = 32, 64
_TILE_ROWS = (192, 128, 64)  # at most what registers hold the sums of
_SHARE = 2  # blocks of a cluster, which read x once
_CLUSTERS = {2: MULTIPROCESSORS // 2, 4: 30}  # that run at once, by their blocks (docs/lab/kernels.md)


@dataclass(frozen=True)
class ExpertTilesKernel(UnitsKernel):
    """
    Attributes:
        rows, columns: N and K.
        is_gated: it gives silu(gate) * up.
    """

    source: ClassVar[str] = "ops/expert_tiles/tiles.cu"
    function: ClassVar[str] = "expert_tiles"
    switch: ClassVar[str] = "compile.disable_passes: [tile_experts]"

    rows: int
    columns: int
    is_gated: bool

    @property
    def share(self) -> int:
        """Blocks of a cluster."""
        return _SHARE

    @property
    def name(self) -> str:
        return f"expert_tiles_{'gated_' if self.is_gated else ''}{self.rows}x{self.columns}"

    @property
    def num_blocks(self) -> int:
        return _CLUSTERS[self.share] * self.share

    @cached_property
    def tile_rows(self) -> int:
        """Rows of the weight in a tile: the more, the less is read again; but a cluster's last tiles may be idle."""

        def cost(tile_rows: int) -> int:
            return math.ceil(self.rows / tile_rows / _SHARE) * (tile_rows + TILE_COST)

        return min(_TILE_ROWS, key=cost)

    def constants(self) -> dict[str, int]:
        return {**super().constants(), "GATED": int(self.is_gated)}


def is_taken(outputs: int, inputs: int) -> bool:
    """True if an expert's weight with so many outputs (activated ones, of a gated linear) divides into tiles."""
    return outputs % _OUTPUTS_UNIT == 0 and inputs % _INPUTS_UNIT == 0
