"""tiles.cu: a ring of tiles that is on its way before the inputs are there; for weights that all multiprocessors hold
together, and for heads. Up to 64 tokens.

Shape legend: as linear.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS
from mllm_compile.runtime.stream_linear.linear import LinearKind, LinearTiling

NORM_ROWS = 32  # outputs that one sum of squares is of

_TILE_COLUMNS = 64
_MAX_MMA_TOKENS = 16  # by mma.sync; beyond it wgmma is faster
_SHARED_RING, _WHOLE_RING = 110 << 10, 200 << 10  # two blocks on a multiprocessor, or one
# A weight streams well that all multiprocessors together hold before its inputs are there, or one so large (a head's)
# that each has many blocks, which begin while others end. One between them ends with what only it waits for: with 64
# tokens the linears of an 8B layer took 11 to 56 % longer than cuBLAS, with 8 as long as Triton's kernels.
_HELD_BYTES = MULTIPROCESSORS * _SHARED_RING
MANY_ROWS = 65536
_LONG_READ = 256 << 10  # bytes a block beyond which it is worth more to have all the ring than to begin early
_INSTRUCTION = """
__device__ __forceinline__ void multiply_add_all(float* d, unsigned long long a, unsigned long long b) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.bf16.bf16 {{{sums}}}, %{a}, %{b}, 1, 1, 1, 0, 0;"
               : {outputs} : "l"(a), "l"(b));
}}
"""


@dataclass(frozen=True)
class TileTiling(LinearTiling):
    """
    Attributes:
        rows: of the weight, a cluster's.
        split: blocks of a cluster, which divide the columns.
        warp_groups: for wgmma; 0: mma.sync, by warps_n x warps_k warps.
        stages: tiles of the ring.
    """

    source: ClassVar[str] = "stream_linear/tiles.cu"
    function: ClassVar[str] = "stream_linear"

    rows: int
    split: int
    warp_groups: int
    warps_n: int
    warps_k: int
    stages: int

    @cached_property
    def num_blocks(self) -> int:
        return self.kind.rows // self.rows * self.split

    @cached_property
    def num_threads(self) -> int:
        """Those that multiply, and a warp that loads."""
        return 32 * ((4 * self.warp_groups or self.warps_n * self.warps_k) + 1)

    @property
    def num_tiles(self) -> int:
        return self.kind.columns // self.split // _TILE_COLUMNS

    @cached_property
    def shared_bytes(self) -> int:
        """The ring, later the sums; and what its alignment may cost."""
        return max(self.stages * _stage_bytes(self.rows, self.tokens), self.tokens * (self.rows + 4) * 4) + 1024

    def constants(self) -> dict[str, int]:
        return {
            **self.kind.constants(),
            "TOKENS": self.tokens,
            "ROWS": self.rows,
            "SPLIT": self.split,
            "STAGES": self.stages,
            "WARP_GROUPS": self.warp_groups,
            "WARPS_N": self.warps_n,
            "WARPS_K": self.warps_k,
        }

    def preamble(self) -> str:
        """wgmma of 64 rows and all tokens; its 64 × tokens sums are tokens / 2 registers of each of 128 threads."""
        if not self.warp_groups:
            return ""
        count = self.tokens // 2
        sums = ", ".join(f"%{i}" for i in range(count))
        outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
        return _INSTRUCTION.format(tokens=self.tokens, sums=sums, outputs=outputs, a=count, b=count + 1)


def takes(rows: int, columns: int) -> bool:
    """Whether a weight [rows, columns] is of those that stream well so."""
    return rows * columns * 2 <= _HELD_BYTES or rows >= MANY_ROWS


def choose(kind: LinearKind, tokens: int) -> TileTiling:
    """The tiling that should take the least time, for a bucket of tokens."""
    return min(_tilings(kind, tokens), key=_nanoseconds)


def _stage_bytes(rows: int, tokens: int) -> int:
    return (rows + tokens) * _TILE_COLUMNS * 2


def _tilings(kind: LinearKind, tokens: int) -> Iterator[TileTiling]:
    is_mma = tokens <= _MAX_MMA_TOKENS
    for rows in (32, 64, 96) if is_mma else (64, 128, 192):
        for split in (1, 2, 4) if is_mma else (1, 2, 4, 8):
            columns = kind.columns // split
            if kind.rows % rows or kind.columns % (split * _TILE_COLUMNS):
                continue
            groups = 0 if is_mma else 1 if columns < 8 * _TILE_COLUMNS else 2
            warps = (2, 4 if split == 1 else 2) if is_mma else (0, 0)
            yield TileTiling(kind, tokens, rows, split, groups, *warps, _num_stages(rows, columns, tokens, groups))


def _num_stages(rows: int, columns: int, tokens: int, warp_groups: int) -> int:
    """As many as fit; warp groups that take turns at tiles must find theirs in the same slots."""
    is_long = warp_groups > 0 and rows * columns * 2 > _LONG_READ
    most = (_WHOLE_RING if is_long else _SHARED_RING) // _stage_bytes(rows, tokens)
    turns = warp_groups or 1
    return max(turns, min(columns // _TILE_COLUMNS, most) // turns * turns)


def _nanoseconds(tiling: TileTiling) -> float:
    """A model of the time, which picks what was the fastest, or within 2 %, of what was measured for the linears of
    Qwen3-0.6B and 8B at 8 and 64 tokens on an H200.

    A multiprocessor reads 35 bytes a nanosecond, x from the L2 at a third of the cost, and takes 130 ns a tile at
    least; adding up, once a wave, grows with the split and with what is exchanged.
    """
    waves = math.ceil(tiling.num_blocks / MULTIPROCESSORS)
    tile = max(130.0, (tiling.rows + 0.3 * tiling.tokens) * _TILE_COLUMNS * 2 / 35)
    exchange = 200 + 60 * tiling.split + tiling.rows * tiling.tokens / 16 if tiling.split > 1 else 0
    return waves * (tiling.num_tiles * tile + exchange)
