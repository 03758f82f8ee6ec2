"""Which of the kernels takes a linear; free of torch, so that passes can ask anywhere.

A linear's shape alone says which kernel, so that what one leaves for the next norm is known where that is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mllm_compile.runtime.stream_linear import rows as by_rows
from mllm_compile.runtime.stream_linear import tiles as by_tiles
from mllm_compile.runtime.stream_linear.linear import MAX_STREAMED_TOKENS, LinearKind, LinearTiling
from mllm_compile.runtime.stream_linear.rows import RowTiling
from mllm_compile.runtime.stream_linear.tiles import TileTiling

FORM_TOKENS = (MAX_STREAMED_TOKENS, by_rows.MAX_TOKENS)  # a piece has a form for the first that all its linears take

_ROWS_UNIT, _COLUMNS_UNIT = 64, 256  # what weights are multiples of
_TILINGS = {tiling.source: tiling for tiling in (TileTiling, RowTiling)}


def is_streamed(rows: int, columns: int, tokens: int) -> bool:
    """Whether a weight [rows, columns] divides into a kernel's blocks for `tokens` tokens, and is the faster for it."""
    if rows % _ROWS_UNIT or columns % _COLUMNS_UNIT or rows * tokens >= 2**31:
        return False
    return by_tiles.takes(rows, columns) or (tokens <= by_rows.MAX_TOKENS and by_rows.takes(rows, columns))


def is_head(rows: int) -> bool:
    """Whether a weight is streamed for its many rows."""
    return rows >= by_tiles.MANY_ROWS


def num_streamed_norm_blocks(rows: int, columns: int) -> int:
    """How many sums of squares a linear leaves for the norm of its outputs."""
    return rows // (by_tiles if by_tiles.takes(rows, columns) else by_rows).NORM_ROWS


def choose_tiling(kind: LinearKind, tokens: int) -> LinearTiling:
    """The tiling for a bucket of tokens.

    Raises:
        ValueError: more tokens than the linear's kernel takes.
    """
    if by_tiles.takes(kind.rows, kind.columns):
        return by_tiles.choose(kind, tokens)
    if tokens > by_rows.MAX_TOKENS:
        raise ValueError(f"{kind.name} is streamed for up to {by_rows.MAX_TOKENS} tokens, not for {tokens}")
    return by_rows.choose(kind)


def tiling_from_json(data: Mapping[str, Any]) -> LinearTiling:
    """What `to_json` gave. Raises KeyError or TypeError for anything else."""
    rest = {name: value for name, value in data.items() if name not in ("source", "kind")}
    return _TILINGS[data["source"]](kind=LinearKind(**data["kind"]), **rest)
