"""Divides a linear of up to 128 tokens among the multiprocessors, for tiles.cu.

Shape legend: as linear.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import ClassVar

from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS
from mllm_compile.runtime.cuda.wgmma import multiply_add_all
from mllm_compile.runtime.ops.stream_linear.linear import NORM_ROWS, Boxes, LinearKind, LinearTiling

_PANEL, _ROW_BYTES = 64, 128  # columns of a swizzled row of shared memory, and its bytes
_M_TOKENS = 64  # of a wgmma, and of a warp group
MAX_TOKENS = 2 * _M_TOKENS
# Rows of a tile, without (wgmma's own limit) and with a residual or a bias, which are in registers as sums are.
_MOST_ROWS = (256, 128)
_MOST_STAGES = 32
# Shared memory of a block: half, so that there is room for one of the next kernel, whose weight comes while this one
# ends; or all. The first where it holds this much of what the block reads of a tile.
_BESIDE_BYTES, BLOCK_BYTES = 113 << 10, 227 << 10
_SHARE_BESIDE = 0.6
# 64 tokens of a short read are faster in stages of four panels, if a block holds all of them (the linears of 0.6B in a
# chain 17.6 and 16.3 µs). A long one is in stages of two, 256 bytes of a row together, as long as a ring has so many.
_MANY_PANELS = 4
_LONG_PANELS, _LEAST_PAIRS = 24, 3
# Clusters that run at the same time. One is in a group of 16 or 18 multiprocessors, and some groups are smaller: of
# clusters of four 30 fit on the GPU that this was measured on.
_CLUSTERS = {1: MULTIPROCESSORS, 2: MULTIPROCESSORS // 2, 4: 29}
# Every block of a cluster reads its part of all tokens, so that columns are divided where tiles would have fewer rows.
# With few columns and more than 64 tokens an exchange of sums takes longer than it saves.
_LEAST_ROWS = {1: 80, 2: 64, 4: NORM_ROWS}
_FEW_COLUMNS, _LEAST_ROWS_OF_FEW = 1024, {1: 32, 2: 64, 4: NORM_ROWS}
_MANY_ROWS = 128  # of tiles that a block takes in turns


@dataclass(frozen=True)
class TileTiling(LinearTiling):
    """
    Attributes:
        rows: rows of the weight in a tile: a multiple of NORM_ROWS.
        split: blocks of a cluster, which divide the columns.
        panels: panels of 64 columns in a stage.
        stages: stages of the ring.
    """

    source: ClassVar[str] = "ops/stream_linear/tiles.cu"
    headers: ClassVar[tuple[str, ...]] = ("ops/stream_linear/boxes.cuh",)
    function: ClassVar[str] = "stream_linear"

    rows: int
    split: int
    panels: int
    stages: int

    @cached_property
    def num_blocks(self) -> int:
        """Number of blocks; undivided tiles are taken in turns, by as many blocks as there are multiprocessors."""
        tiles = math.ceil(self.kind.rows / self.rows)
        return tiles * self.split if self.split > 1 else min(tiles, MULTIPROCESSORS)

    def boxes(self, num_tokens: int) -> Boxes:
        return Boxes(self.rows, self.panels, num_tokens)

    @cached_property
    def num_threads(self) -> int:
        """Threads of the warp groups that multiply, and of the one that loads."""
        return 128 * (_all_tokens(self.tokens) // _M_TOKENS + 1)

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
        return multiply_add_all(self.rows)


@cache
def choose(kind: LinearKind, tokens: int) -> TileTiling:
    """The tiling for a bucket of tokens.

    Measured for the linears of six Qwen3 shapes (0.6B to 32B) at 8 to 128 tokens on an H200, it is the fastest or
    within 4 % of it; within 14 % for some that take a few µs.
    """
    is_short = kind.columns <= _FEW_COLUMNS and tokens > _M_TOKENS
    least_rows = _LEAST_ROWS_OF_FEW if is_short else _LEAST_ROWS
    splits = (split for split in least_rows if kind.columns // _PANEL % split == 0)
    split = next((split for split in splits if _rows_of(kind, split, tokens) >= least_rows[split]), 1)
    return divided(kind, tokens, split)


def divided(kind: LinearKind, tokens: int, split: int) -> TileTiling:
    """The tiling for a bucket of tokens whose clusters have `split` blocks."""
    rows = _rows_of(kind, split, tokens)
    panels = kind.columns // split // _PANEL
    if tokens == _M_TOKENS and panels % _MANY_PANELS == 0:
        stages = panels // _MANY_PANELS
        if stages * _stage_bytes(rows, _MANY_PANELS, tokens) + _other_bytes(rows, split, tokens) <= BLOCK_BYTES:
            return TileTiling(kind, tokens, rows, split, _MANY_PANELS, stages)
    pairs = _num_stages(rows, split, 2, tokens, panels // 2)
    if panels >= _LONG_PANELS and panels % 2 == 0 and tokens <= _M_TOKENS and pairs >= _LEAST_PAIRS:
        return TileTiling(kind, tokens, rows, split, 2, pairs)
    return TileTiling(kind, tokens, rows, split, 1, _num_stages(rows, split, 1, tokens, panels))


def with_panels(tiling: TileTiling, panels: int) -> TileTiling:
    """The same division with stages of so many panels, as many as fit."""
    steps = tiling.kind.columns // tiling.split // _PANEL // panels
    stages = _num_stages(tiling.rows, tiling.split, panels, tiling.tokens, steps)
    return replace(tiling, panels=panels, stages=stages)


def all_of(kind: LinearKind, tokens: int) -> Iterator[TileTiling]:
    """The tilings of one wave for a bucket of tokens, with rings of one and of two panels; for measurements."""
    for split in _CLUSTERS:
        rows = _rows_of(kind, split, tokens)
        panels = kind.columns // split // _PANEL
        for each in (1, 2):
            if rows and kind.columns % (split * _PANEL * each) == 0:
                stages = _num_stages(rows, split, each, tokens, panels // each)
                if stages > 1:
                    yield TileTiling(kind, tokens, rows, split, each, stages)


def _rows_of(kind: LinearKind, split: int, tokens: int) -> int:
    """Rows of a tile: each cluster takes one; if that is too many rows, clusters take turns that leave the fewest idle.
    0 if clusters of several blocks would have to."""

    def in_turns(turns: int) -> int:
        return NORM_ROWS * math.ceil(kind.rows / (_CLUSTERS[split] * turns * NORM_ROWS))

    first = next(turns for turns in itertools.count(1) if in_turns(turns) <= _MOST_ROWS[kind.residual or kind.bias])
    if split > 1 and first > 1:
        return 0
    choices = [turns for turns in range(first, 2 * first + 1) if turns == first or in_turns(turns) > _MANY_ROWS]
    return in_turns(min(choices, key=lambda turns: in_turns(turns) * turns))


def _num_stages(rows: int, split: int, panels: int, tokens: int, steps: int) -> int:
    """Stages of the ring: as many as fit, beside the next kernel's if that are most of a tile's `steps`."""
    beside, alone = (
        (room - _other_bytes(rows, split, tokens)) // _stage_bytes(rows, panels, tokens)
        for room in (_BESIDE_BYTES, BLOCK_BYTES)
    )
    return min(beside if beside >= _SHARE_BESIDE * steps else alone, steps, _MOST_STAGES)


def _stage_bytes(rows: int, panels: int, tokens: int) -> int:
    return panels * (rows + tokens) * _ROW_BYTES


def _all_tokens(tokens: int) -> int:
    """Tokens that are multiplied, padding included."""
    return math.ceil(tokens / _M_TOKENS) * _M_TOKENS


def _other_bytes(rows: int, split: int, tokens: int) -> int:
    """Bytes of the ring's alignment, others' sums, factors, barriers, and tokens that wgmma reads but are not there."""
    sums = (split - 1) * math.ceil(rows / NORM_ROWS / split) * NORM_ROWS * _all_tokens(tokens) * 4
    missing = (_all_tokens(tokens) - tokens) * _ROW_BYTES
    factors = _all_tokens(tokens) * 4
    return 1024 + sums + factors + (2 * _MOST_STAGES + 2) * 8 + missing
