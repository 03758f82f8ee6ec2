"""Rows that the kernel of ops/rms_norm.py takes; free of Triton."""

from __future__ import annotations

_MOST_COLUMNS = 16384  # of a row, which stays in registers
_NUMBERS_OF_WARP = 512


def is_taken(columns: int) -> bool:
    """True for rows of so many numbers."""
    return 0 < columns <= _MOST_COLUMNS


def num_warps(columns: int) -> int:
    """Warps of a row: a power of two."""
    warps = 1
    while warps * _NUMBERS_OF_WARP < columns and warps < 16:
        warps *= 2
    return warps
