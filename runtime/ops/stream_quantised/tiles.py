"""tiles.cu: tiles of rows, by TMA, whose values are multiplied from registers. 16, 32 or 64 tokens.

Shape legend: as linear.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar

from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS
from mllm_compile.runtime.ops.stream_linear.linear import NORM_ROWS, Boxes
from mllm_compile.runtime.ops.stream_quantised.linear import GROUP, HEADERS, QuantisedKind, QuantisedTiling

MAX_TOKENS = 64

_X_ROW_BYTES = 2 * GROUP  # of a token and a panel
_MOST_STAGES = 32
# Shared memory of a block: half, so that there is room for one of the next kernel, whose weight comes while this one
# ends; or all.
_BESIDE_BYTES, _BLOCK_BYTES = 113 << 10, 227 << 10
_SHARE_BESIDE = 0.5  # of what a block reads of a tile: with a ring for so much half of the memory is enough
_CLUSTERS = {1: MULTIPROCESSORS, 2: MULTIPROCESSORS // 2, 4: 29}  # that run at the same time
_MOST_ROWS = 256  # of a box
_WARPS, _MOST_WARPS = 8, 12  # that multiply: as a rule, and at most


@dataclass(frozen=True)
class TileTiling(QuantisedTiling):
    """
    Attributes:
        rows: rows of the weight in a tile.
        split: blocks of a cluster, which divide the columns.
        row_tiles: sixteens of rows of a warp.
        column_warps: warps that divide the panels of a stage.
        panels: panels of GROUP columns in a stage.
        stages: stages of the ring.
    """

    source: ClassVar[str] = "ops/stream_quantised/tiles.cu"
    headers: ClassVar[tuple[str, ...]] = (*HEADERS, "ops/stream_linear/boxes.cuh")
    function: ClassVar[str] = "quantised_tiles"

    rows: int
    split: int
    row_tiles: int
    column_warps: int
    panels: int
    stages: int

    @property
    def num_tiles(self) -> int:
        return math.ceil(self.kind.rows / self.rows)

    @cached_property
    def num_blocks(self) -> int:
        """Number of blocks; undivided tiles are taken in turns, by as many blocks as there are multiprocessors."""
        return self.num_tiles * self.split if self.split > 1 else min(self.num_tiles, MULTIPROCESSORS)

    def boxes(self, num_tokens: int) -> Boxes:
        return Boxes(self.rows, self.panels, num_tokens)

    @cached_property
    def num_warps(self) -> int:
        """Warps that multiply."""
        return self.rows // (NORM_ROWS * self.row_tiles) * self.column_warps

    @cached_property
    def num_threads(self) -> int:
        """Threads of the warps that multiply, and of the four that load."""
        return 32 * (4 + self.num_warps)

    @property
    def steps(self) -> int:
        """Stages of a block's tile."""
        return self.kind.columns // GROUP // self.split // self.panels

    @property
    def stage_bytes(self) -> int:
        return self.panels * (self.rows * GROUP + self.tokens * _X_ROW_BYTES)

    @property
    def _other_bytes(self) -> int:
        """Bytes of the ring's alignment, sums, scales, factors and barriers."""
        places = math.ceil(self.rows // NORM_ROWS / self.split)
        inbox = places * self.tokens // 8 * self.split * self.column_warps * 512
        scales = self.rows * ((self.steps * self.panels if self.kind.group else 1) | 1) * 4
        return 1024 + inbox + scales + self.tokens * 4 + 16 + 16

    @cached_property
    def shared_bytes(self) -> int:
        return self.stages * (self.stage_bytes + 16) + self._other_bytes

    @property
    def is_beside(self) -> bool:
        """True if a multiprocessor has room for a block of the next kernel."""
        return self.shared_bytes <= _BESIDE_BYTES

    def constants(self) -> dict[str, int]:
        return {
            **self.kind.constants(),
            "TOKENS": self.tokens,
            "ROWS": self.rows,
            "SPLIT": self.split,
            "M_TILES": self.row_tiles,
            "K_WARPS": self.column_warps,
            "BLOCKS": self.num_blocks,
            "RESIDENT": 2 if self.is_beside and self.num_threads * 2 * 96 <= 65536 else 1,
            "NUM_THREADS": self.num_threads,
            "SHARED_BYTES": self.shared_bytes,
            "PANELS": self.panels,
            "STAGES": self.stages,
        }


def divide(
    kind: QuantisedKind, tokens: int, rows: int, split: int, row_tiles: int, column_warps: int, panels: int, room: int
) -> TileTiling | None:
    """The tiling with as many stages as have room in so many bytes; None: it is none."""
    of_block, remainder = divmod(kind.columns, GROUP * split * panels)
    if remainder or rows % (NORM_ROWS * row_tiles) or panels % column_warps or rows > _MOST_ROWS:
        return None
    for stages in range(min(_MOST_STAGES, of_block), 0, -1):
        tiling = TileTiling(kind, tokens, rows, split, row_tiles, column_warps, panels, stages)
        if tiling.shared_bytes <= room:
            fits = split == 1 or tiling.num_tiles <= _CLUSTERS[split]
            return tiling if fits and stages >= min(3, of_block) and tiling.num_warps <= _MOST_WARPS else None
    return None


def all_tilings(kind: QuantisedKind, tokens: int) -> Iterator[TileTiling]:
    """The possible tilings."""
    for split, row_tiles, column_warps, panels, room in itertools.product(
        _CLUSTERS, (1, 2), (1, 2, 4), (1, 2, 4), (_BESIDE_BYTES, _BLOCK_BYTES)
    ):
        unit = NORM_ROWS * row_tiles
        for turns in (1, 2, 3, 4) if split == 1 else (1,):
            rows = unit * math.ceil(kind.rows / (_CLUSTERS[split] * turns * unit))
            tiling = divide(kind, tokens, rows, split, row_tiles, column_warps, panels, room)
            if tiling is not None:
                yield tiling


@cache
def choose(kind: QuantisedKind, tokens: int) -> TileTiling:
    """The tiling for a bucket of tokens: the one that should read the fastest."""
    return min(all_tilings(kind, tokens), key=_cost)


def best_by_form(kind: QuantisedKind, tokens: int) -> Iterator[tuple[str, TileTiling]]:
    """The best tiling of each number of rows and columns of a warp, panels of a stage, and room."""
    found: dict[str, TileTiling] = {}
    for tiling in sorted(all_tilings(kind, tokens), key=_cost):
        room = "beside" if tiling.is_beside else "alone"
        name = f"M{tiling.row_tiles} K{tiling.column_warps} P{tiling.panels} {room}"
        found.setdefault(name, tiling)
    yield from found.items()


def _cost(tiling: TileTiling) -> tuple[float, ...]:
    kind, split = tiling.kind, tiling.split
    turns = math.ceil(tiling.num_tiles * split / MULTIPROCESSORS) if split == 1 else 1
    columns = kind.columns // split
    read = turns * columns * (tiling.rows + 1.0 * tiling.tokens)  # x, of two bytes, comes from the L2
    sent = tiling.rows * tiling.tokens * 4 * tiling.column_warps if split > 1 or tiling.column_warps > 1 else 0
    in_flight = tiling.stages * tiling.panels * tiling.rows * GROUP
    starved = max(0, min(64 << 10, columns * tiling.rows) - in_flight)
    beside = 0 if tiling.is_beside else 32 << 10
    # Registers: four warps of a scheduler have 128 each, three 168.
    sums = tiling.row_tiles * tiling.tokens // 2 * (2 if kind.group else 1)
    crowded = 256 << 10 if sums > (64 if tiling.num_warps > _WARPS else 96) else 0
    warps = abs(tiling.num_warps - _WARPS) << 11
    return (read + sent + starved + beside + crowded + warps, -tiling.panels)
