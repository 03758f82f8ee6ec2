"""Describes the boxes of matrices that kernels read by TMA, in panels of 64 columns; keeps earlier maps.

Shape legend: N rows and K columns of a contiguous matrix: bfloat16, or in `rows` and `panels` bytes, where a panel has
128 columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mllm_compile.runtime.cuda.driver import Axis, TensorMap

_PANEL_BYTES = 128  # of a row: what is swizzled together
_PANEL = _PANEL_BYTES // 2  # columns in bfloat16
_NARROW = 16  # columns of a product of tensor cores
_EIGHT = 8  # rows, whose swizzle begins anew
_LANES = 4  # that have a row of wgmma's sums: two neighbouring ones of each eight

Axes = tuple[Axis, ...]


def rows(matrix: torch.Tensor, count: int) -> Axes:
    """A panel of `count` rows, at (column, row)."""
    return _columns(matrix), Axis(matrix.shape[0], _row_bytes(matrix), count)


def panels(matrix: torch.Tensor, count: int, num_panels: int) -> Axes:
    """`num_panels` panels of `count` rows, one after another, at (0, row, panel)."""
    return (
        Axis(_panel(matrix), matrix.element_size(), _panel(matrix)),
        Axis(matrix.shape[0], _row_bytes(matrix), count),
        _panels(matrix, num_panels),
    )


def halves(matrix: torch.Tensor, count: int, num_panels: int) -> Axes:
    """Like `panels`, for eight rows of the first half of all rows, eight of the second, and so on, at
    (0, 0, 0, row / 16, panel)."""
    num_rows, row = matrix.shape[0], _row_bytes(matrix)
    return (
        Axis(_PANEL, matrix.element_size(), _PANEL),
        Axis(_EIGHT, row, _EIGHT),
        Axis(2, num_rows // 2 * row, 2),
        Axis(num_rows // (2 * _EIGHT), _EIGHT * row, count // (2 * _EIGHT)),
        _panels(matrix, num_panels),
    )


def spread_halves(matrix: torch.Tensor) -> Axes:
    """A panel of 32 rows of the first half of all rows and 32 of the second, in eights of each by turns, at
    (column, 0, row / 8, 0, 0) of a half.

    Rows 2 q and 2 q + 1 of the j-th eight are 8 q + 2 j and 8 q + 2 j + 1 of the 32. So lane q of four, which has these
    two of each eight of wgmma's sums, has eight neighbours of the 32.
    """
    num_rows, row = matrix.shape[0], _row_bytes(matrix)
    return (
        _columns(matrix),
        Axis(2, row, 2),
        Axis(num_rows // (2 * _EIGHT), _EIGHT * row, _LANES),
        Axis(2, num_rows // 2 * row, 2),
        Axis(_EIGHT // 2, 2 * row, _EIGHT // 2),
    )


def spread_slots(half: torch.Tensor) -> Axes:
    """16 columns of a panel as `spread_halves` has it, of one half of each slot's rows: at (column, 0, row / 8, 0, 0),
    the row counted through all slots' halves of either kind, with zeros for the second half; at -1 in the place of the
    last but one 0 zeros come first.

    Args:
        half: [L, N / 2, r], a half of the rows of [L, N, r].
    """
    num_slots, num_rows, rank = half.shape
    row, all_rows = rank * half.element_size(), (2 * num_slots - 1) * num_rows
    return (
        Axis(rank, half.element_size(), _NARROW),
        Axis(2, row, 2),
        Axis(all_rows // _EIGHT, _EIGHT * row, _LANES),
        Axis(1, num_rows * row, 2),
        Axis(_EIGHT // 2, 2 * row, _EIGHT // 2),
    )


def expert_halves(weights: torch.Tensor) -> Axes:
    """`spread_halves` of each expert's [N, K], at (column, 0, row / 8, 0, 0), the row counted through all experts."""
    num_experts, num_rows, _ = weights.shape
    columns, pair, eights, half, fours = spread_halves(weights[0])
    return columns, pair, Axis(num_experts * num_rows // _EIGHT, eights.stride, eights.box), half, fours


def expert_rows(weights: torch.Tensor) -> Axes:
    """A panel of 64 rows of all experts' [N, K], in thirty-twos, at (column, 0, 0, 0, row / 32).

    Rows 2 q and 2 q + 1 of the j-th eight are 8 q + 2 j and 8 q + 2 j + 1 of the 32, as in `spread_halves`.
    """
    num_experts, num_rows, _ = weights.shape
    row = _row_bytes(weights[0])
    return (
        _columns(weights[0]),
        Axis(2, row, 2),
        Axis(_LANES, _EIGHT * row, _LANES),
        Axis(_EIGHT // 2, 2 * row, _EIGHT // 2),
        Axis(num_experts * num_rows // 32, 32 * row, 2),
    )


def heads(x: torch.Tensor, rows: int, columns: int, num_heads: int, row: int, head: int) -> Axes:
    """`rows` times `columns` of one head of x [N, H, D], at (column, head, row); `row` and `head` are x's strides."""
    size = x.element_size()
    return Axis(x.shape[2], size, columns), Axis(num_heads, head * size, 1), Axis(x.shape[0], row * size, rows)


def _columns(matrix: torch.Tensor) -> Axis:
    return Axis(matrix.shape[1], matrix.element_size(), _panel(matrix))


def _panel(matrix: torch.Tensor) -> int:
    return _PANEL_BYTES // matrix.element_size()


def _panels(matrix: torch.Tensor, count: int) -> Axis:
    """The last axis' stride is the smallest: the driver takes them in any order."""
    return Axis(matrix.shape[1] // _panel(matrix), _PANEL_BYTES, count)


def _row_bytes(matrix: torch.Tensor) -> int:
    return matrix.shape[1] * matrix.element_size()


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x, contiguous and at an address that TMA and loads of 16 bytes take."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


class TensorMaps:
    """The maps that a kernel's calls have needed: they hold addresses and sizes, no tensors."""

    _MOST = 4096  # a weight or cache for each layer and, without graphs, inputs wherever the allocator puts them

    def __init__(self) -> None:
        self._maps: dict[tuple[Any, ...], TensorMap] = {}

    def get(self, matrix: torch.Tensor, boxes: Callable[..., Axes], *of: int) -> TensorMap:
        """The map of `boxes(matrix, *of)`, `boxes` being one of the functions above."""
        key = (matrix.data_ptr(), matrix.shape[0], matrix.dtype, boxes, *of)
        if key not in self._maps:
            if len(self._maps) >= self._MOST:
                self._maps.clear()
            self._maps[key] = TensorMap(matrix, boxes(matrix, *of))
        return self._maps[key]
