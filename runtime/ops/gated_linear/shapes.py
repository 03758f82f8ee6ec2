"""The gated linears that the kernel takes; free of torch, so that passes can ask anywhere."""

from __future__ import annotations

_ROWS_UNIT, _COLUMNS_UNIT = 64, 64


def is_taken(rows: int, columns: int) -> bool:
    """True if a weight [rows, columns] divides into tiles."""
    return rows % _ROWS_UNIT == 0 and columns % _COLUMNS_UNIT == 0
