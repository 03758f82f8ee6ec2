"""Divides the products of experts with many rows among the multiprocessors, for tiles.cu.

Shape legend: N rows (of a gated weight gates, then ups) and K columns of an expert's weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS, CudaKernel
from mllm_compile.runtime.cuda.wgmma import multiply_add_all
from mllm_compile.runtime.json_data import from_json
from mllm_compile.runtime.ops.expert_tiles.shapes import TILE_UNITS, UNIT_ROWS

_TILE_ROWS = (192, 128, 64)  # at most what registers hold the sums of
_ROW_BYTES = 128  # of a stage: 64 columns
_BLOCK_BYTES = 227 << 10
_OTHER_BYTES = 1024 + 256  # what the ring's alignment may cost, and barriers
_NUM_THREADS = 384
_TILE_COST = 40  # of beginning and ending a tile, in rows, as in gated_linear/kernel.py
_SHARE = 2  # blocks of a cluster, which read x once


@dataclass(frozen=True)
class ExpertTilesKernel(CudaKernel):
    """
    Attributes:
        rows, columns: N and K.
        is_gated: it gives silu(gate) * up.
    """

    headers: ClassVar[tuple[str, ...]] = ("cuda/units.cuh",)
    source: ClassVar[str] = "ops/expert_tiles/tiles.cu"
    function: ClassVar[str] = "expert_tiles"
    switch: ClassVar[str] = "compile.disable_passes: [tile_experts]"

    rows: int
    columns: int
    is_gated: bool

    @property
    def name(self) -> str:
        return f"expert_tiles_{'gated_' if self.is_gated else ''}{self.rows}x{self.columns}"

    @property
    def num_threads(self) -> int:
        return _NUM_THREADS

    @property
    def num_blocks(self) -> int:
        return MULTIPROCESSORS // _SHARE * _SHARE

    @property
    def outputs(self) -> int:
        return self.rows // 2 if self.is_gated else self.rows

    @cached_property
    def tile_rows(self) -> int:
        """Rows of the weight in a tile: the more, the less is read again; but a cluster's last tiles may be idle."""

        def cost(tile_rows: int) -> int:
            return math.ceil(self.rows / tile_rows / _SHARE) * (tile_rows + _TILE_COST)

        return min(_TILE_ROWS, key=cost)

    @cached_property
    def stages(self) -> int:
        return (_BLOCK_BYTES - _OTHER_BYTES) // self._stage_bytes

    @property
    def shared_bytes(self) -> int:
        return self.stages * self._stage_bytes + _OTHER_BYTES

    @property
    def _stage_bytes(self) -> int:
        return (self.tile_rows + TILE_UNITS * UNIT_ROWS) * _ROW_BYTES

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ExpertTilesKernel:
        """Reads what `to_json` wrote. Raises ValueError for anything else."""
        return from_json(cls, {name: value for name, value in data.items() if name != "source"})

    def constants(self) -> dict[str, int]:
        return {
            "N": self.rows,
            "K": self.columns,
            "GATED": int(self.is_gated),
            "UNITS": TILE_UNITS,
            "ROWS": self.tile_rows,
            "SHARE": _SHARE,
            "STAGES": self.stages,
            "NUM_THREADS": self.num_threads,
            "SHARED_BYTES": self.shared_bytes,
        }

    def preamble(self) -> str:
        return multiply_add_all(self.tile_rows)
