"""The linears that the few-token kernels take, and their blocks; free of Triton, so that passes can ask anywhere."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

MAX_FEW_TOKENS = 16  # rows of one product of the tensor cores

_ROWS_UNIT, _COLUMNS_UNIT = 64, 256  # what weights are multiples of
_ELEMENT_BYTES = 2  # of float16 and bfloat16
_MAX_NORM_BLOCKS = 256  # sums of squares a token; a block of the next linear holds all its tokens' in registers


@dataclass(frozen=True)
class FewTokenBlocks:
    """The work of one program: `rows` outputs of up to MAX_FEW_TOKENS tokens.

    `groups` of its `num_warps` warps share the inputs among them; each takes `columns` at a time, and `stages` times as
    many are on their way.
    """

    rows: int
    columns: int
    groups: int
    num_warps: int
    stages: int

    def within(self, shared_bytes: int, *, is_gated: bool) -> FewTokenBlocks:
        """The same with as many stages, at least two, as fit into a block's shared memory: an RTX or L40S has 99 KB."""
        weight_rows = self.rows * (2 if is_gated else 1)
        stage_bytes = (weight_rows + MAX_FEW_TOKENS) * self.columns * self.groups * _ELEMENT_BYTES
        return replace(self, stages=max(2, min(self.stages, shared_bytes // stage_bytes)))


# (most outputs, most inputs, blocks); the first that fits is taken. They are the fastest, or within 1 %, for the
# linears of Qwen3-0.6B and 8B at 8 tokens on an H200, each in a chain of all kernels of a layer. A linear with few
# outputs has few blocks, so each has more warps at its inputs.
_PLAIN = (
    (2048, math.inf, FewTokenBlocks(8, 128, 4, 4, 4)),
    (4096, 1024, FewTokenBlocks(32, 128, 1, 4, 4)),
    (4096, math.inf, FewTokenBlocks(16, 256, 2, 2, 3)),
    (8192, math.inf, FewTokenBlocks(64, 128, 1, 4, 4)),
)
_WIDE = FewTokenBlocks(64, 128, 1, 2, 3)
# A gated one reads two rows for each output; with 4 stages one block fits on an SM, with 2 two do.
_GATED = ((32 * 132, math.inf, FewTokenBlocks(32, 256, 1, 4, 4)),)
_WIDE_GATED = FewTokenBlocks(32, 256, 1, 4, 2)


def choose_few_token_blocks(rows: int, columns: int, *, is_gated: bool = False) -> FewTokenBlocks:
    """Blocks for a linear with `rows` outputs and `columns` inputs, which `is_taken` takes."""
    table, widest = (_GATED, _WIDE_GATED) if is_gated else (_PLAIN, _WIDE)
    fitting = (blocks for most_rows, most_columns, blocks in table if rows <= most_rows and columns <= most_columns)
    blocks = next(fitting, widest)
    of_group = (columns & -columns) // blocks.groups  # a power of two that divides each group's inputs
    return replace(blocks, columns=min(blocks.columns, of_group))


def is_taken(rows: int, columns: int) -> bool:
    """True if a weight [rows, columns] divides into the kernels' blocks."""
    return rows % _ROWS_UNIT == 0 and columns % _COLUMNS_UNIT == 0 and rows * columns < 2**31  # offsets are int32


def num_norm_blocks(rows: int, columns: int) -> int | None:
    """Sums of squares that a linear leaves for the norm of its outputs; None where they are too many."""
    count = rows // choose_few_token_blocks(rows, columns).rows
    return count if count <= _MAX_NORM_BLOCKS else None
