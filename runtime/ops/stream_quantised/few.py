"""few.cu: boxes of 16 rows, in rings that leave room for the next kernel's. 8 or 16 tokens.

Shape legend: as linear.py.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar

from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS
from mllm_compile.runtime.ops.stream_linear.linear import NORM_ROWS, Boxes, early_stages
from mllm_compile.runtime.ops.stream_linear.shapes import is_head
from mllm_compile.runtime.ops.stream_quantised.linear import (
    BLOCK_BYTES,
    GROUP,
    HEADERS,
    QuantisedKind,
    QuantisedTiling,
    room_of_block,
)

FEWEST_TOKENS, MAX_TOKENS = 8, 16

_STEP_BYTES = 64  # of a row, that a warp's step takes
_WARPS = 8  # of a block
_RESIDENT = 2  # blocks of a multiprocessor
_INPUT_REGISTERS = 64  # of a thread that hold inputs, at most: it has 128
_CLUSTERS = {1: MULTIPROCESSORS, 2: MULTIPROCESSORS // 2}  # by their blocks
_PIECES = (1024, 512)  # bytes of a row
_MOST_STAGES = 16
_MOST_PASSES = 3  # with more tokens than eight: with more passes tiles take less
# Bytes of a row that are read while a pass waits for x, a turn's sums are added up, and a stage is asked for and
# released; and for a column of x, which counts where a block's weight is there before x is: in four bits.
_OF_WAIT, _OF_TURN, _OF_STAGE, _OF_COLUMN = 1700, 350, 450, 0.75
_ZEROS_UNIT = 4 * GROUP  # columns whose zero points one copy takes, at least


@dataclass(frozen=True)
class FewTiling(QuantisedTiling):
    """
    Attributes:
        split: blocks of a cluster, which divide the columns.
        passes: times that a block goes over its rows, each with a part of the columns.
        clusters: they take groups of rows in turns.
        piece: columns of a row in a stage.
        stages: stages of the ring.
    """

    source: ClassVar[str] = "ops/stream_quantised/few.cu"
    headers: ClassVar[tuple[str, ...]] = HEADERS
    function: ClassVar[str] = "quantised_linear"

    split: int
    passes: int
    clusters: int
    piece: int
    stages: int

    @cached_property
    def num_blocks(self) -> int:
        return self.clusters * self.split

    @cached_property
    def num_threads(self) -> int:
        return 32 * _WARPS

    def boxes(self, num_tokens: int) -> Boxes:
        return Boxes(NORM_ROWS, self.piece // self.kind.panel, 0)

    @cached_property
    def shared_bytes(self) -> int:
        """Bytes that a block asks for: what it needs, or more, where no second one may be beside it."""
        return room_of_block(self.kind) if self.kind.residual else self.needed_bytes

    @cached_property
    def needed_bytes(self) -> int:
        """Bytes of the ring and its alignment; sums of warps and of blocks, operands, factors and barriers."""
        kind = self.kind
        of_groups = self.piece // kind.group * (kind.scale_bytes + kind.zeros) if kind.group else 0
        stage = NORM_ROWS * (self.piece // kind.values_a_byte + of_groups)
        turns = math.ceil(self.kind.rows / NORM_ROWS / self.clusters)
        places = math.ceil(turns / self.split)
        sums = self.tokens * NORM_ROWS * 4
        unsent = turns * sums if self.split > 1 and self.passes > 1 else 16
        totals = _WARPS * self.steps if kind.values == "int4" else 1
        of_place = self.split * sums
        of_place += self.tokens * 32 if kind.residual else 0
        of_place += NORM_ROWS * 4 if not kind.group or kind.values == "nvfp4" else 0
        of_place += 32 if kind.next_blocks or kind.bias else 0
        of_place += 8 if self.split > 1 else 0
        least = 8 + 8 + 32 + 8 + 16  # of unused arrays; barriers of sums
        return (
            1023
            + self.stages * (stage + 16)
            + 2 * _WARPS * sums
            + places * of_place
            + unsent
            + self.tokens * 4 * (1 + totals)
            + least
        )

    @property
    def _early_stages(self) -> int:
        """Stages on their way until x is there: with zero points all, as there are no registers left to wait with."""
        if self.kind.zeros:
            return self.stages
        return early_stages(NORM_ROWS * self.piece // self.kind.values_a_byte, _RESIDENT)

    @property
    def steps(self) -> int:
        """A warp's steps of a pass."""
        pieces = math.ceil(self.kind.columns / self.split / self.piece / self.passes)
        return pieces * _steps_of_piece(self.kind, self.piece)

    def constants(self) -> dict[str, int]:
        return {
            **self.kind.constants(),
            "TOKENS": self.tokens,
            "SPLIT": self.split,
            "PASSES": self.passes,
            "WARPS": _WARPS,
            "CLUSTERS": self.clusters,
            "RESIDENT": _RESIDENT,
            "PIECE": self.piece,
            "STAGES": self.stages,
            "EARLY_STAGES": self._early_stages,
            "SHARED_BYTES": self.shared_bytes,
        }


def _steps_of_piece(kind: QuantisedKind, piece: int) -> int:
    """Steps of a warp in a piece: in each 16 bytes of a row are a lane's."""
    return math.ceil(piece // kind.values_a_byte / _STEP_BYTES / _WARPS)


def divide(kind: QuantisedKind, tokens: int, split: int, piece_bytes: int) -> FewTiling | None:
    """The tiling with pieces of so many bytes of a row, and as many stages as leave room for one of the next kernel's,
    or, of a head, whose sums take a third of that, as a multiprocessor has room for; None: none fits.
    """
    groups, piece = kind.rows // NORM_ROWS, piece_bytes * kind.values_a_byte
    if kind.columns % (split * math.lcm(kind.panel, _ZEROS_UNIT if kind.zeros else 1)):
        return None
    pieces = math.ceil(kind.columns / split / piece)
    of_piece = tokens * kind.values_a_byte * _steps_of_piece(kind, piece)  # registers that hold its inputs
    passes = math.ceil(pieces * of_piece / _INPUT_REGISTERS)
    if passes > 1 and tokens == FEWEST_TOKENS:  # a pass loads the inputs of the next one
        passes = math.ceil(pieces * of_piece / (_INPUT_REGISTERS // 2))
    elif passes > 1 and kind.group and of_piece < _INPUT_REGISTERS:  # scales take registers too
        passes = math.ceil(pieces * of_piece / (_INPUT_REGISTERS - of_piece))
    clusters, room = min(groups, _CLUSTERS[split]), BLOCK_BYTES if is_head(kind.rows) else room_of_block(kind)
    tilings = (FewTiling(kind, tokens, split, passes, clusters, piece, stages) for stages in range(_MOST_STAGES, 1, -1))
    return next((tiling for tiling in tilings if tiling.needed_bytes <= room), None)


def all_tilings(kind: QuantisedKind, tokens: int) -> list[FewTiling]:
    """The possible tilings. Of integers of four bits tiles take less than those for more than eight tokens: 8B's layer
    took 55.9 µs with 16, 52.5 by tiles (H200). So many sums of a head leave a ring no room."""
    if (kind.values == "int4" or is_head(kind.rows)) and tokens > FEWEST_TOKENS:
        return []
    tilings = (divide(kind, tokens, split, size) for split, size in itertools.product(_CLUSTERS, _PIECES))
    most = math.inf if tokens == FEWEST_TOKENS else _MOST_PASSES
    return [tiling for tiling in tilings if tiling is not None and tiling.passes <= most]


@cache
def takes(kind: QuantisedKind, tokens: int) -> bool:
    """True if there is a tiling for a bucket of tokens."""
    return bool(all_tilings(kind, tokens))


@cache
def choose(kind: QuantisedKind, tokens: int) -> FewTiling:
    """The tiling for a bucket of tokens."""
    found = all_tilings(kind, tokens)
    if not found:
        raise ValueError(f"the linear {kind.name} does not divide")
    return min(found, key=_cost)


def _cost(tiling: FewTiling) -> float:
    """Bytes of a row that a block could read in its time, those past the last one too."""
    kind, of_block = tiling.kind, tiling.kind.columns / tiling.split
    turns = math.ceil(kind.rows / NORM_ROWS / tiling.clusters)
    stages = math.ceil(of_block / tiling.piece / tiling.passes)
    of_turn = stages * (tiling.piece / kind.values_a_byte + _OF_STAGE) + _OF_TURN
    of_x = of_block * _OF_COLUMN if kind.values_a_byte > 1 else 0
    return tiling.passes * (turns * of_turn + _OF_WAIT) + of_x
