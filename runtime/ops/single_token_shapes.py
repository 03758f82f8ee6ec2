"""The linears that the single-token kernels take, and their blocks; free of Triton, so that passes can ask anywhere."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_BLOCK_ROWS = 4
_MIN_BLOCK_COLUMNS = 256


@dataclass(frozen=True)
class Blocks:
    """The work of one program: `rows` outputs, `columns` inputs at a time, in `num_warps` warps."""

    rows: int
    columns: int
    num_warps: int


def choose_blocks(columns: int, *, is_normed: bool = False, is_gated: bool = False) -> Blocks:
    """The best of 7 to 15 choices for the linears of Qwen3-0.6B (1024 columns) and 8B (4096) on an H200, within 2 %,
    each in a chain of all kernels of a layer.

    A gated linear reads two rows for each output.
    """
    widest = columns & -columns  # the largest power of two that divides it
    if is_gated:
        return Blocks(1, 4096, 4) if widest >= 4096 else Blocks(2, min(widest, 512), 2)
    if is_normed:
        return Blocks(2, 2048, 8) if widest >= 4096 else Blocks(2, min(widest, 1024), 4)
    return Blocks(2, min(widest, 2048 if columns <= 4096 else 1024), 4)


def is_taken(rows: int, columns: int) -> bool:
    """True if a weight [rows, columns] divides into the kernels' blocks."""
    divides = rows % _MAX_BLOCK_ROWS == 0 and columns & -columns >= _MIN_BLOCK_COLUMNS
    return divides and rows * columns < 2**31  # offsets are int32
