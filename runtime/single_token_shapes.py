"""Which linears the single-token kernels take, and in what blocks; free of Triton, so that passes can ask anywhere."""

from __future__ import annotations

# Outputs of one program. 2 rows of 1024 columns and 4 warps are within 10 % of the best of 30 choices for every linear
# of Qwen3-0.6B and 8B (H200); fewer rows a program keep more of its weight under way.
BLOCK_ROWS = 2
NUM_WARPS = 4
_MAX_BLOCK_COLUMNS = 1024
_MIN_BLOCK_COLUMNS = 256


def block_columns(columns: int) -> int:
    """The largest power of two, at most 1024, that divides `columns`."""
    return min(columns & -columns, _MAX_BLOCK_COLUMNS)


def is_taken(rows: int, columns: int) -> bool:
    """Whether a weight [rows, columns] divides into the kernels' blocks."""
    return rows % BLOCK_ROWS == 0 and block_columns(columns) >= _MIN_BLOCK_COLUMNS
