"""The rows that kernels of sums over ranks norm; free of torch."""

from __future__ import annotations

_CHUNK_NUMBERS = 8  # of 16 bytes in bfloat16
_MOST_COLUMNS = 16384


def is_normed(columns: int) -> bool:
    """True if there are kernels for rows of so many numbers."""
    return columns % _CHUNK_NUMBERS == 0 and 0 < columns <= _MOST_COLUMNS
