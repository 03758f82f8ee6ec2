"""The kernels of towers' attention (attend.cu), as they are compiled and launched; free of torch.

Shape legend: N rows, H heads, Hk heads of keys, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.cuda.wgmma import multiply, multiply_registers
from mllm_compile.runtime.json_data import from_json

GROUP_ROWS = 64  # of a group of four warps
PANEL = 64  # columns of a head in a panel of 128 bytes
_GROUP_THREADS = 128
_ITEM_BYTES = 2
_ALIGNMENT = 1024
_BARRIER_BYTES = 8


@dataclass(frozen=True)
class TowerKernel(CudaKernel):
    """
    Attributes:
        head_dim: D.
        rows: of a block.
        keys: of a tile.
        stages: tiles of keys and of values that a block holds.
        takes_turns: groups begin their products one after another.
    """

    source: ClassVar[str] = "ops/varlen/attend.cu"
    function: ClassVar[str] = "tower_attention"
    switch: ClassVar[str] = "compile.hopper_towers: false"

    head_dim: int
    rows: int
    keys: int
    stages: int
    takes_turns: bool

    @property
    def name(self) -> str:
        return f"tower_{self.head_dim}_rows{self.rows}_keys{self.keys}_stages{self.stages}_turns{int(self.takes_turns)}"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TowerKernel:
        """Reads what `to_json` wrote. Raises ValueError for anything else."""
        return from_json(cls, {name: value for name, value in data.items() if name != "source"})

    @property
    def num_threads(self) -> int:
        return _GROUP_THREADS * (1 + self.rows // GROUP_ROWS)

    @property
    def rest_columns(self) -> int:
        """Columns of the last panel, which holds what whole ones leave; 0: there is none."""
        rest = self.head_dim % PANEL
        return 0 if rest == 0 else 16 if rest <= 16 else 32

    @property
    def shared_bytes(self) -> int:
        row = (self.head_dim // PANEL * PANEL + self.rest_columns) * _ITEM_BYTES
        barriers = 1 + 4 * self.stages
        return _ALIGNMENT + (self.rows + 2 * self.stages * self.keys) * row + barriers * _BARRIER_BYTES

    def constants(self) -> dict[str, int]:
        return {
            "D": self.head_dim,
            "ROWS": self.rows,
            "KEYS": self.keys,
            "STAGES": self.stages,
            "TAKES_TURNS": int(self.takes_turns),
            "BY_SUMS": 0,
            "OVERLAPS": 1,
            "NUM_THREADS": self.num_threads,
            "SHARED_BYTES": self.shared_bytes,
        }

    def preamble(self) -> str:
        rest = self.head_dim % PANEL
        parts = [multiply(self.keys, "multiply_keys"), multiply_registers(PANEL, "weigh_panel", transposed=True)]
        parts += [multiply_registers(rest, "weigh_rest", transposed=True)] if rest else []
        return "".join(parts)

    def num_blocks(self, segments: int, longest: int, num_heads: int) -> int:
        return math.ceil(longest / self.rows) * segments * num_heads
