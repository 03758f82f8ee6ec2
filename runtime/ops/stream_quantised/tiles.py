"""tiles.cu: tiles of rows, by TMA, whose values wgmma takes from registers. 16, 32, 64 or 128 tokens.

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
from mllm_compile.runtime.cuda.wgmma import multiply_registers
from mllm_compile.runtime.ops.stream_linear.linear import NORM_ROWS, Boxes, early_stages
from mllm_compile.runtime.ops.stream_linear.shapes import is_head
from mllm_compile.runtime.ops.stream_quantised.linear import (
    BLOCK_BYTES,
    GROUP,
    HEADERS,
    PANEL_BYTES,
    QuantisedKind,
    QuantisedTiling,
    room_of_block,
)

MAX_TOKENS = 128

_X_BYTES = 2  # of an input of a token
_GROUP_ROWS = 64  # of wgmma, and of a warp group
_MOST_WARP_GROUPS, _MANY_TOKENS, _MOST_OF_MANY = 3, 64, 2  # that multiply: up to so many tokens, and with more
_MOST_STAGES = 32
_BESIDE_THREADS = 256  # 128 registers each
_CLUSTERS = {1: MULTIPROCESSORS, 2: MULTIPROCESSORS // 2, 4: 29}  # that run at the same time
_TURNS, _TURNS_OF_HEAD = (1, 2, 3, 4, 6, 8), range(4, 33)  # that a block takes undivided tiles in
_MOST_ROWS = 256  # of a box
# Bytes a clock of a multiprocessor: from memory, through the L2, and those that shared memory takes or gives.
_MEMORY_RATE, _L2_RATE, _SHARED_RATE = 13.8, 24.0, 128.0
_SEND_RATE = 16.0  # bytes of sums a clock, to other blocks


@dataclass(frozen=True)
class TileTiling(QuantisedTiling):
    """
    Attributes:
        rows: rows of the weight in a tile.
        split: blocks of a cluster, which divide the columns.
        column_groups: warp groups that divide the columns of a stage.
        panels: panels of 128 bytes of a row in a stage.
        stages: stages of the ring.
    """

    source: ClassVar[str] = "ops/stream_quantised/tiles.cu"
    headers: ClassVar[tuple[str, ...]] = (*HEADERS, "ops/stream_linear/boxes.cuh")
    function: ClassVar[str] = "quantised_tiles"

    rows: int
    split: int
    column_groups: int
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

    @property
    def row_groups(self) -> int:
        """Warp groups that divide the rows."""
        return math.ceil(self.rows / _GROUP_ROWS)

    @cached_property
    def num_threads(self) -> int:
        """Threads of the warp groups that multiply, and of the one that loads."""
        return 128 * (1 + self.row_groups * self.column_groups)

    @property
    def steps(self) -> int:
        """Stages of a block's tile."""
        return self.kind.columns // self.kind.panel // self.split // self.panels

    @property
    def stage_bytes(self) -> int:
        return self.panels * (self.rows * PANEL_BYTES + self.tokens * self.kind.panel * _X_BYTES)

    @property
    def _scale_words(self) -> int:
        """Words of a row's scales in shared memory: of floats of four bits four scales are in one."""
        kind = self.kind
        if not kind.group:
            return 1
        return self.kind.columns // self.split // kind.group // (4 if kind.has_floats else 1)

    @property
    def _other_bytes(self) -> int:
        """Bytes of the ring's alignment, sums, scales, factors and barriers."""
        places = math.ceil(self.rows // NORM_ROWS / self.split)
        inbox = places * self.tokens // 8 * self.split * self.column_groups * 512
        if self.split == 1 and self.num_tiles == self.num_blocks and inbox <= self.stages * self.stage_bytes:
            inbox = 0  # of a block's only tile they are where the ring was
        scales = self.rows * (self._scale_words | 1) * 4
        return 1024 + inbox + scales + self.tokens * 4 + 16 + 16

    @cached_property
    def shared_bytes(self) -> int:
        """Bytes that a block asks for: what it needs, or more, where no second one may be beside it (few.py)."""
        return room_of_block(self.kind) if self.kind.residual and self.is_beside else self.needed_bytes

    @cached_property
    def needed_bytes(self) -> int:
        return self.stages * (self.stage_bytes + 16) + self._other_bytes

    @property
    def is_beside(self) -> bool:
        """True if a multiprocessor has room for a block of the next kernel, in shared memory and registers."""
        is_small = self.needed_bytes <= room_of_block(self.kind) and self.tokens <= _MANY_TOKENS
        return is_small and self.num_threads <= _BESIDE_THREADS

    @property
    def resident(self) -> int:
        return 2 if self.is_beside else 1

    def preamble(self) -> str:
        return multiply_registers(self.tokens)

    def constants(self) -> dict[str, int]:
        return {
            **self.kind.constants(),
            "TOKENS": self.tokens,
            "ROWS": self.rows,
            "SPLIT": self.split,
            "K_GROUPS": self.column_groups,
            "BLOCKS": self.num_blocks,
            "RESIDENT": self.resident,
            "NUM_THREADS": self.num_threads,
            "SHARED_BYTES": self.shared_bytes,
            "PANELS": self.panels,
            "STAGES": self.stages,
            "EARLY_STAGES": early_stages(self.stage_bytes, self.resident),
        }


def divide(
    kind: QuantisedKind, tokens: int, rows: int, split: int, column_groups: int, panels: int, room: int
) -> TileTiling | None:
    """The tiling with as many stages as have room in so many bytes, or None."""
    of_block, remainder = divmod(kind.columns, kind.panel * split * panels)
    stage_groups = panels * kind.panel // GROUP
    if remainder or rows % NORM_ROWS or stage_groups % column_groups or rows > _MOST_ROWS:
        return None
    for stages in range(min(_MOST_STAGES, of_block), 0, -1):
        tiling = TileTiling(kind, tokens, rows, split, column_groups, panels, stages)
        if tiling.needed_bytes <= room:
            fits = split == 1 or tiling.num_tiles <= _CLUSTERS[split]
            most_groups = _MOST_WARP_GROUPS if tokens <= _MANY_TOKENS else _MOST_OF_MANY
            fits &= tiling.row_groups * column_groups <= most_groups
            least_stages = 3 if tokens <= _MANY_TOKENS else 2
            return tiling if fits and stages >= min(least_stages, of_block) else None
    return None


def all_tilings(kind: QuantisedKind, tokens: int) -> Iterator[TileTiling]:
    """The possible tilings. A block has about half of a multiprocessor's shared memory, so that there is room for one
    of the next kernel, whose weight comes while this one ends; or all."""
    of_one = _TURNS_OF_HEAD if is_head(kind.rows) else _TURNS
    for split, column_groups, panels, room in itertools.product(
        _CLUSTERS, (1, 2, 3), (1, 2, 3, 4), (room_of_block(kind), BLOCK_BYTES)
    ):
        for turns in of_one if split == 1 else (1,):
            rows = NORM_ROWS * math.ceil(kind.rows / (_CLUSTERS[split] * turns * NORM_ROWS))
            tiling = divide(kind, tokens, rows, split, column_groups, panels, room)
            if tiling is not None:
                yield tiling


@cache
def takes(kind: QuantisedKind, tokens: int) -> bool:
    """True if there is a tiling for a bucket of tokens."""
    return next(all_tilings(kind, tokens), None) is not None


@cache
def choose(kind: QuantisedKind, tokens: int) -> TileTiling:
    """The tiling for a bucket of tokens: the one that should take the fewest clocks."""
    return min(all_tilings(kind, tokens), key=cost)


def cost(tiling: TileTiling) -> tuple[float, ...]:
    """Clocks of a block: per input the longest part, then the sums' way and late loads."""
    kind, split = tiling.kind, tiling.split
    turns = math.ceil(tiling.num_tiles * split / MULTIPROCESSORS) if split == 1 else 1
    inputs = turns * kind.columns // split
    weight, x = tiling.rows / kind.values_a_byte, _X_BYTES * tiling.tokens
    groups = tiling.row_groups
    of_input = max(
        weight / _MEMORY_RATE,
        (weight + x) / _L2_RATE,
        (weight + x) / _SHARED_RATE + groups * (1 + x / _SHARED_RATE),  # a lane's loads, and wgmma's of x
        groups * 1.4,  # instructions that take values apart
        groups * tiling.tokens / 32,  # wgmma
    )
    is_sent = split > 1 or tiling.column_groups > 1
    sent = tiling.rows * tiling.tokens * 4 * tiling.column_groups / _SEND_RATE if is_sent else 0
    in_flight = tiling.stages * tiling.panels * tiling.rows * PANEL_BYTES
    starved = max(0, min(64 << 10, inputs * weight) - in_flight) / _MEMORY_RATE
    # A head is a step's last linear. Of as many clocks fewer turns are better: with 16 tokens 8B's took 166 µs in 18
    # turns, and 128 in four bits in eight; with 32, in six turns, 153 and 107 (H200).
    of_head = is_head(kind.rows)
    beside = 0 if tiling.is_beside or of_head else 2000
    # A warp group waits for its own products. With 16 tokens 8B's down in four bits takes 11.5 µs so beside the next
    # kernel, and 11.9 alone by two warp groups; a layer takes 51.2 and 53.7 (H200).
    alone = 40 * tiling.tokens if groups * tiling.column_groups == 1 else 0
    # With 64 tokens 8B's o and down take 12.0 and 24.8 µs by clusters of four, 10.8 and 21.0 by clusters of two that
    # read x twice as often, of fp8; in four bits 9.6 and 19.1, 8.0 and 15.9 (H200).
    of_fours = 2 if split == 4 and tiling.tokens <= _MANY_TOKENS else 1
    return (inputs * of_input * of_fours + sent + starved + beside + alone, of_head * turns, -tiling.panels)
