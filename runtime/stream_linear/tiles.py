"""tiles.cu: how a linear of up to 128 tokens is divided among the multiprocessors.

Shape legend: as linear.py.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar

from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS
from mllm_compile.runtime.stream_linear.linear import NORM_ROWS, LinearKind, LinearTiling

_PANEL, _ROW_BYTES = 64, 128  # columns of a swizzled row of shared memory, and its bytes
_GROUP_TOKENS = 64  # of a warp group
_MOST_ROWS = 256  # of wgmma, and of a box of TMA
_MOST_ROWS_WITH_RESIDUAL = 128  # which is in registers too
_MOST_STAGES = 32
# Shared memory of a block: half, so that there is room for one of the next kernel, whose weight comes while this one
# ends; or all. The first where it holds this much of what the block reads of a tile.
_BESIDE_BYTES, _BLOCK_BYTES = 113 << 10, 227 << 10
_SHARE_BESIDE = 0.6
# A long read is the faster in stages of two panels, 256 bytes of a row together, as long as a ring has so many of them.
_LONG_PANELS, _LEAST_PAIRS = 24, 3
# Clusters that run at the same time. One lies in a group of 16 or 18 multiprocessors, and some groups are smaller: of
# clusters of four 30 fit on the GPU that this was measured on.
_CLUSTERS = {1: MULTIPROCESSORS, 2: MULTIPROCESSORS // 2, 4: 29}
# Every block of a cluster reads its part of all tokens, so that columns are divided where tiles would have fewer rows.
_LEAST_ROWS = {1: 80, 2: 64, 4: 0}
_MANY_ROWS = 128  # of tiles that a block takes in turns
_INSTRUCTION = """
__device__ __forceinline__ void multiply_add_all(float* d, unsigned long long a, unsigned long long b) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 {{{sums}}}, %{a}, %{b}, 1, 1, 1, 0, 0;"
               : {outputs} : "l"(a), "l"(b));
}}
"""


@dataclass(frozen=True)
class TileTiling(LinearTiling):
    """
    Attributes:
        rows: of the weight, a tile's: a multiple of NORM_ROWS.
        split: blocks of a cluster, which divide the columns.
        panels: of 64 columns, of a stage.
        stages: of the ring.
    """

    source: ClassVar[str] = "stream_linear/tiles.cu"
    function: ClassVar[str] = "stream_linear"

    rows: int
    split: int
    panels: int
    stages: int

    @cached_property
    def num_blocks(self) -> int:
        """Undivided tiles are taken in turns by as many blocks as there are multiprocessors."""
        tiles = math.ceil(self.kind.rows / self.rows)
        return tiles * self.split if self.split > 1 else min(tiles, MULTIPROCESSORS)

    @cached_property
    def num_threads(self) -> int:
        """Of the warp groups that multiply, and of the one that loads."""
        return 128 * (_num_groups(self.tokens) + 1)

    @cached_property
    def shared_bytes(self) -> int:
        return self.stages * _stage_bytes(self.rows, self.panels, self.tokens) + _other_bytes(
            self.rows, self.split, self.tokens
        )

    def constants(self) -> dict[str, int]:
        return {
            **self.kind.constants(),
            "TOKENS": self.tokens,
            "ROWS": self.rows,
            "SPLIT": self.split,
            "BLOCKS": self.num_blocks,
            "NUM_THREADS": self.num_threads,
            "SHARED_BYTES": self.shared_bytes,
            "PANELS": self.panels,
            "STAGES": self.stages,
        }

    def preamble(self) -> str:
        """wgmma of 64 tokens and a tile's rows; its sums are rows / 2 registers of each of 128 threads."""
        count = self.rows // 2
        sums = ", ".join(f"%{i}" for i in range(count))
        outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
        return _INSTRUCTION.format(rows=self.rows, sums=sums, outputs=outputs, a=count, b=count + 1)


@cache
def choose(kind: LinearKind, tokens: int) -> TileTiling:
    """The tiling for a bucket of tokens.

    Of those measured for the linears of six Qwen3 shapes (0.6B to 32B) at 8 to 128 tokens on an H200 it is the fastest
    or within 4 % of it; within 14 % of some that take a few µs.
    """
    split = next(split for split, least in _LEAST_ROWS.items() if _rows_of(kind, split) >= least)
    rows = _rows_of(kind, split)
    panels = kind.columns // split // _PANEL
    pairs = _num_stages(rows, split, 2, tokens, panels // 2)
    if panels >= _LONG_PANELS and panels % 2 == 0 and tokens <= _GROUP_TOKENS and pairs >= _LEAST_PAIRS:
        return TileTiling(kind, tokens, rows, split, 2, pairs)
    return TileTiling(kind, tokens, rows, split, 1, _num_stages(rows, split, 1, tokens, panels))


def _rows_of(kind: LinearKind, split: int) -> int:
    """Of a tile: each cluster takes one, or, where that were too many rows, takes turns that leave the fewest idle."""

    def in_turns(turns: int) -> int:
        return NORM_ROWS * math.ceil(kind.rows / (_CLUSTERS[split] * turns * NORM_ROWS))

    most = _MOST_ROWS_WITH_RESIDUAL if kind.residual else _MOST_ROWS
    first = next(turns for turns in itertools.count(1) if in_turns(turns) <= most)
    choices = [turns for turns in range(first, 2 * first + 1) if turns == first or in_turns(turns) > _MANY_ROWS]
    return in_turns(min(choices, key=lambda turns: in_turns(turns) * turns))


def _num_stages(rows: int, split: int, panels: int, tokens: int, steps: int) -> int:
    """Of the ring: as many as fit, beside the next kernel's if that are most of the `steps` of a tile."""
    for room in (_BESIDE_BYTES, _BLOCK_BYTES):
        most = (room - _other_bytes(rows, split, tokens)) // _stage_bytes(rows, panels, tokens)
        if most >= _SHARE_BESIDE * steps:
            break
    return min(most, steps, _MOST_STAGES)


def _stage_bytes(rows: int, panels: int, tokens: int) -> int:
    return panels * (rows + tokens) * _ROW_BYTES


def _num_groups(tokens: int) -> int:
    return math.ceil(tokens / _GROUP_TOKENS)


def _other_bytes(rows: int, split: int, tokens: int) -> int:
    """What the ring's alignment may cost, others' sums, factors, barriers, and what wgmma reads of tokens not there."""
    groups, owned = _num_groups(tokens), math.ceil(rows / NORM_ROWS / split)
    sums = (split - 1) * groups * owned * NORM_ROWS * _GROUP_TOKENS * 4
    missing = max(0, _GROUP_TOKENS - tokens) * _ROW_BYTES
    return 1024 + sums + groups * _GROUP_TOKENS * 4 + (2 * _MOST_STAGES + 2) * 8 + missing
