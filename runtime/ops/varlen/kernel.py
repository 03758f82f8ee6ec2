"""The kernels of attention within segments (attend.cu), as they are compiled and launched; free of torch.

Shape legend: N rows, H heads, Hk heads of keys, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS, CudaKernel
from mllm_compile.runtime.cuda.wgmma import multiply, multiply_registers
from mllm_compile.runtime.json_data import from_json

GROUP_ROWS = 64  # of a group of four warps
PANEL = 64  # columns of a head in a panel of 128 bytes
_GROUP_THREADS = 128
_ITEM_BYTES = 2
_ALIGNMENT = 1024
_BARRIER_BYTES = 8
_BEGIN_COST = 128  # in keys: what beginning and ending a block costs
# Rows, keys, stages, and whether groups take turns.
_OF_WINDOWS = (64, 64, 2, False)
_OF_IMAGES = ((128, 128, 2, False), (192, 112, 2, False))
_OF_WIDE_HEADS = ((128, 128, 2, False),)  # of 128: what registers hold the sums of


@dataclass(frozen=True)
class SegmentsKernel(CudaKernel):
    """
    Attributes:
        head_dim: D.
        rows: of a block.
        keys: of a tile.
        stages: tiles of keys and of values that a block holds.
        takes_turns: groups begin their products one after another.
    """

    source: ClassVar[str] = "ops/varlen/attend.cu"
    function: ClassVar[str] = "segment_attention"
    switch: ClassVar[str] = "compile.disable_passes: [attend_segments]"

    head_dim: int
    rows: int
    keys: int
    stages: int
    takes_turns: bool

    @property
    def name(self) -> str:
        return (
            f"segments_{self.head_dim}_rows{self.rows}_keys{self.keys}_stages{self.stages}_turns{int(self.takes_turns)}"
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SegmentsKernel:
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
            "TRIAL": 0,
            "SKIPS": 0,
            "NARROW_VALUES": 0,
            "BLOCKS": 1,
            "REGISTERS": {64: 240, 128: 240, 192: 160, 256: 112}[self.rows],
            "OVERLAPS": 1,
            "NUM_THREADS": self.num_threads,
            "SHARED_BYTES": self.shared_bytes,
        }

    def preamble(self) -> str:
        rest = self.head_dim % PANEL
        parts = [multiply(self.keys, "multiply_keys"), multiply_registers(PANEL, "weigh_panel", transposed=True)]
        parts += [multiply_registers(rest, "weigh_rest", transposed=True)] if rest else []
        return "".join(parts)

    def cost(self, num_segments: int, longest: int, num_heads: int) -> float:
        """Estimated cost of segments about as long as the longest: of two kernels the cheaper is the faster."""
        num_blocks = math.ceil(longest / self.rows) * num_segments * num_heads
        tiles = math.ceil(longest / self.keys)
        return math.ceil(num_blocks / MULTIPROCESSORS) * self.rows * (tiles * self.keys + _BEGIN_COST)


def segments_kernels(head_dim: int) -> tuple[SegmentsKernel, ...]:
    """The kernels of heads of `head_dim`: each is the fastest for some segments."""
    of_images = _OF_WIDE_HEADS if head_dim > 96 else _OF_IMAGES
    return tuple(SegmentsKernel(head_dim, *division) for division in (_OF_WINDOWS, *of_images))


def choose(kernels: Iterable[SegmentsKernel], num_segments: int, longest: int, num_heads: int) -> SegmentsKernel:
    """Chooses the fastest of a head dim's kernels, which are in the order of segments_kernels."""
    kernels = list(kernels)
    if longest <= GROUP_ROWS:
        return kernels[0]
    return min(kernels[1:], key=lambda kernel: kernel.cost(num_segments, longest, num_heads))
