"""Divides the products of experts with many rows among the multiprocessors, for tiles.cu.

Shape legend: N rows (of a gated weight gates, then ups) and K columns of an expert's weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS
from mllm_compile.runtime.cuda.units import TILE_COST, TILE_UNITS, UnitsKernel

_TILE_ROWS = (192, 128, 64)  # at most what registers hold the sums of
_HELD_REGISTERS = 204  # for a lane's sums, one a row of a tile, and for outputs of the tile before
_STORE_REGISTERS, _LANE_OUTPUTS = 4, 32  # a store has 8 outputs, of the 32 that four neighbouring lanes have
_SHARE = 2  # blocks of a cluster, which read x once
_CLUSTERS = {2: MULTIPROCESSORS // 2, 4: 30}  # that run at once, by their blocks (docs/kernels.md)


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

    @cached_property
    def held_stores(self) -> int:
        """The stores of a lane's tile that leave during the next tile's products.

        None of a gated linear: for three of its twelve there are registers, and with those it is 1 % slower.
        """
        stores = TILE_UNITS * self.tile_rows // _LANE_OUTPUTS
        return 0 if self.is_gated else min(stores, (_HELD_REGISTERS - self.tile_rows) // _STORE_REGISTERS)

    def constants(self) -> dict[str, int]:
        return {**super().constants(), "GATED": int(self.is_gated), "HELD": self.held_stores}
