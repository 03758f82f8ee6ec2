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
from mllm_compile.runtime.files.json_data import from_json

_PANEL = 64  # columns of a head in a panel of 128 bytes
_REST = 32  # at most, in a panel of 64 bytes
GROUP_ROWS = 64  # of a group of four warps
PANEL = 64  # columns of a head in a panel of 128 bytes
_GROUP_THREADS = 128
_ITEM_BYTES = 2
_ALIGNMENT = 1024
_BARRIER_BYTES = 8
_REGISTERS = {64: 240, 128: 240, 192: 160, 256: 112}  # of a thread that multiplies, by rows
_BEGIN_COST = 128  # in keys: what beginning and ending a block costs
# A key's cost in a block of so many rows, relative to one of 128 rows; measured with heads of 64 to 80.
_KEY_COST = {64: 0.85, 128: 1.0, 192: 1.32, 256: 1.86}
# Rows, keys, stages.
_OF_WINDOWS = (64, 64, 2)
_OF_IMAGES = ((128, 128, 2), (192, 112, 2), (256, 64, 2))
_WIDEST = {128: 128, 192: 96, 256: 72}  # head dims whose sums registers hold, by rows


@dataclass(frozen=True)
class SegmentsKernel(CudaKernel):
    """
    Attributes:
        head_dim: D.
        rows: of a block.
        keys: of a tile.
        stages: tiles of keys and of values that a block holds.
    """

    source: ClassVar[str] = "ops/segments/attend.cu"
    function: ClassVar[str] = "segment_attention"
    switch: ClassVar[str] = "compile.disable_passes: [attend_segments]"

    head_dim: int
    rows: int
    keys: int
    stages: int

    @property
    def name(self) -> str:
        return f"segments_{self.head_dim}_rows{self.rows}_keys{self.keys}_stages{self.stages}"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SegmentsKernel:
        """Reads what `to_json` wrote. Raises ValueError for anything else."""
        return from_json(cls, {name: value for name, value in data.items() if name != "source"})

    @property
    def num_threads(self) -> int:
        return _GROUP_THREADS * (1 + self.rows // GROUP_ROWS)

    @property
    def rest_columns(self) -> int:
        """Columns of the last panel, the rest after whole ones; 0: it has none."""
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
            "REGISTERS": _REGISTERS[self.rows],
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
        return math.ceil(num_blocks / MULTIPROCESSORS) * _KEY_COST[self.rows] * (tiles * self.keys + _BEGIN_COST)


def segments_kernels(head_dim: int) -> tuple[SegmentsKernel, ...]:
    """The kernels of heads of `head_dim`: each is the fastest for some segments."""
    of_images = (division for division in _OF_IMAGES if head_dim <= _WIDEST[division[0]])
    return tuple(SegmentsKernel(head_dim, *division) for division in (_OF_WINDOWS, *of_images))


def choose(kernels: Iterable[SegmentsKernel], num_segments: int, longest: int, num_heads: int) -> SegmentsKernel:
    """Chooses the fastest of a head dim's kernels, which are in the order of segments_kernels."""
    kernels = list(kernels)
    if longest <= GROUP_ROWS:
        return kernels[0]
    return min(kernels[1:], key=lambda kernel: kernel.cost(num_segments, longest, num_heads))


def is_taken(head_dim: int, sm_scale: float) -> bool:
    """True for heads of 64, 72, 80, 88, 96 and 128."""
    panels, rest = divmod(head_dim, _PANEL)
    return sm_scale > 0 and head_dim % 8 == 0 and 1 <= panels <= 2 and rest <= (_REST if panels == 1 else 0)
