"""few.cu: boxes of 16 rows, in rings that leave room for the next kernel's. 8 tokens.

Shape legend: as linear.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar

from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS
from mllm_compile.runtime.ops.stream_fp8.linear import GROUP, Fp8Kind, Fp8Tiling
from mllm_compile.runtime.ops.stream_linear.linear import NORM_ROWS, Boxes

MAX_TOKENS = 8

_STEP = 64  # columns of a warp's step
_WARPS = 8  # of a block
_INPUT_REGISTERS = 64  # of a thread, at most: where two blocks are on a multiprocessor it has twice as many
_ROOM_BYTES, _RESERVED_BYTES = 228 << 10, 1 << 10  # shared memory of a multiprocessor; of that, a block's of the system
_MOST_STAGES = 16


@dataclass(frozen=True)
class FewTiling(Fp8Tiling):
    """
    Attributes:
        split: blocks of a cluster, which divide the columns.
        passes: times that a block goes over its rows, each with a part of the columns.
        clusters: they take groups of rows in turns.
        warps: warps of a block.
        resident: blocks of a multiprocessor that there are registers for.
        piece: columns of a row in a stage.
        stages: stages of the ring.
        lead: stages that are not asked for yet when the next kernel is let in.
    """

    source: ClassVar[str] = "ops/stream_fp8/few.cu"
    function: ClassVar[str] = "fp8_linear"

    split: int
    passes: int
    clusters: int
    warps: int
    resident: int
    piece: int
    stages: int
    lead: int

    @cached_property
    def num_blocks(self) -> int:
        return self.clusters * self.split

    @cached_property
    def num_threads(self) -> int:
        return 32 * self.warps

    def boxes(self, num_tokens: int) -> Boxes:
        return Boxes(NORM_ROWS, self.piece // GROUP, num_tokens)

    @cached_property
    def shared_bytes(self) -> int:
        """Bytes of the ring and its alignment; sums of warps and of blocks, operands, factors and barriers."""
        scales = NORM_ROWS * (self.piece // GROUP) * 4 if self.kind.group else 0
        stage = math.ceil((NORM_ROWS * self.piece + scales) / 1024) * 1024
        turns = math.ceil(self.kind.rows / NORM_ROWS / self.clusters)
        places = math.ceil(turns / self.split)
        sums = MAX_TOKENS * NORM_ROWS * 4
        unsent = turns if self.split > 1 and self.passes > 1 else 1
        of_place = self.split * sums + MAX_TOKENS * 32 + NORM_ROWS * 4 + 32 + 8
        return (
            1023
            + self.stages * (stage + 16)
            + self.warps * sums
            + places * of_place
            + unsent * sums
            + MAX_TOKENS * 4
            + 8
        )

    @property
    def input_registers(self) -> int:
        """Registers of a thread that hold inputs."""
        pieces = math.ceil(self.kind.columns / self.split / self.piece / self.passes)
        return pieces * math.ceil(self.piece / _STEP / self.warps) * 8

    def constants(self) -> dict[str, int]:
        return {
            **self.kind.constants(),
            "SPLIT": self.split,
            "PASSES": self.passes,
            "WARPS": self.warps,
            "CLUSTERS": self.clusters,
            "RESIDENT": self.resident,
            "PIECE": self.piece,
            "STAGES": self.stages,
            "LEAD": self.lead,
            "SHARED_BYTES": self.shared_bytes,
        }


def divide(
    kind: Fp8Kind, piece: int = 1024, resident: int = 2, lead: int = 0, split: int | None = None
) -> FewTiling | None:
    """The tiling with so many columns of a piece, and as many stages as leave room for `resident` blocks;
    None: none fits.
    """
    groups = kind.rows // NORM_ROWS
    splits = [of for of in (1, 2) if kind.columns % (of * GROUP) == 0 and split in (None, of)]
    if not splits:
        return None
    split = min(splits, key=lambda split: math.ceil(groups * split / MULTIPROCESSORS) / split)  # of what a block takes
    pieces = math.ceil(kind.columns / split / piece)
    of_piece = 8 * math.ceil(piece / _STEP / _WARPS)
    passes = math.ceil(pieces * of_piece / _INPUT_REGISTERS)
    if passes > 1 and kind.group:  # scales take registers too
        passes = math.ceil(pieces * of_piece / (_INPUT_REGISTERS - of_piece))
    clusters = min(groups, MULTIPROCESSORS // split)
    room = _ROOM_BYTES // resident - _RESERVED_BYTES
    tilings = (
        FewTiling(kind, MAX_TOKENS, split, passes, clusters, _WARPS, resident, piece, stages, lead)
        for stages in range(_MOST_STAGES, 1, -1)
    )
    return next((tiling for tiling in tilings if tiling.shared_bytes <= room), None)


@cache
def choose(kind: Fp8Kind) -> FewTiling:
    tiling = divide(kind)
    if tiling is None:
        raise ValueError(f"the linear {kind.name} does not divide")
    return tiling
