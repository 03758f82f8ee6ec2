"""Chooses the kernel for a linear and a number of tokens; free of torch, so that passes can ask anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS
from mllm_compile.runtime.files.json_data import from_json
from mllm_compile.runtime.ops.stream_linear import lanes as by_lanes
from mllm_compile.runtime.ops.stream_linear import rows as by_rows
from mllm_compile.runtime.ops.stream_linear import tiles as by_tiles
from mllm_compile.runtime.ops.stream_linear import wide as by_wide_tiles
from mllm_compile.runtime.ops.stream_linear.lanes import LaneTiling
from mllm_compile.runtime.ops.stream_linear.linear import MAX_STREAMED_TOKENS, NORM_ROWS, LinearKind, LinearTiling
from mllm_compile.runtime.ops.stream_linear.rows import RowTiling
from mllm_compile.runtime.ops.stream_linear.tiles import TileTiling
from mllm_compile.runtime.ops.stream_linear.wide import WideTiling

MAX_LARGE_TOKENS, MAX_HEAD_TOKENS = 208, 64
# A piece has a variant for the first that all its linears take.
VARIANT_TOKENS = (MAX_STREAMED_TOKENS, MAX_LARGE_TOKENS, 128, MAX_HEAD_TOKENS)  # 128: of weights in few bits

_ROWS_UNIT, _COLUMNS_UNIT = 64, 64  # what weights are multiples of
_ROUTER_ROWS = 32  # fewer than a unit, which all kernels but rows.cu divide
_HEAD_ROWS, _ODD_HEAD_ROWS = 65536, 32768  # the latter of those that do not divide
_LARGE_BYTES = MULTIPROCESSORS * (110 << 10)  # of a weight that is not loaded whole before the inputs arrive
_TILINGS = {tiling.source: tiling for tiling in (LaneTiling, TileTiling, RowTiling, WideTiling)}


def is_streamed(rows: int, columns: int, tokens: int) -> bool:
    """True if a weight [rows, columns] divides into tiles, and is read the faster so with up to `tokens` tokens.

    With 128 a head is not: Qwen3-8B's takes 340 µs, by cuBLAS 310. With more than 208 a large weight is not. In steps
    of 209 to 240 requests 8B's layers are as fast by cuBLAS, gated.cu and kernels for norms. With 256 these are faster,
    and for Qwen3-4B's layers with 240. A router may have 32 rows. A large head of even rows that 64 does not divide
    (Whisper's 51,866) is tiles.cu's.
    """
    if columns % _COLUMNS_UNIT or rows * tokens >= 2**31:
        return False
    if rows % _ROWS_UNIT and not (rows == _ROUTER_ROWS and is_held(rows, columns)):
        return rows % 2 == 0 and rows >= _ODD_HEAD_ROWS and tokens <= MAX_HEAD_TOKENS
    if is_head(rows):
        return tokens <= MAX_HEAD_TOKENS
    return tokens <= (MAX_LARGE_TOKENS if _is_large(rows, columns) else MAX_STREAMED_TOKENS)


def is_head(rows: int) -> bool:
    """True if a weight has so many rows that it is taken for a head's."""
    return rows >= _HEAD_ROWS


def is_read_in_rows(rows: int, columns: int) -> bool:
    """True if rows.cu takes a weight for its few tokens: the faster for a large weight that is no head's."""
    return rows % _ROWS_UNIT == 0 and _is_large(rows, columns) and not is_head(rows) and by_rows.takes(rows, columns)


def is_held(rows: int, columns: int) -> bool:
    """True if lanes.cu takes a weight for its few tokens."""
    return not is_read_in_rows(rows, columns) and by_lanes.takes(LinearKind(rows, columns))


def _is_large(rows: int, columns: int) -> bool:
    return rows * columns * 2 > _LARGE_BYTES


@cache
def num_streamed_norm_blocks(rows: int, columns: int) -> int:
    """Sums of squares that a linear leaves for the norm of its outputs, whichever kernel computes it.

    Remembered: every launch asks, and the answer compares tilings for a third of a millisecond.
    """
    return rows // (by_lanes.TILE_ROWS if is_held(rows, columns) else NORM_ROWS)


def choose_tiling(kind: LinearKind, tokens: int) -> LinearTiling:
    """The tiling for a bucket of tokens."""
    if tokens <= by_rows.MAX_TOKENS and is_read_in_rows(kind.rows, kind.columns):
        return by_rows.choose(kind)
    if tokens <= by_lanes.MAX_TOKENS and by_lanes.takes(kind):
        return by_lanes.choose(kind)
    return by_wide_tiles.choose(kind, tokens) if tokens > by_tiles.MAX_TOKENS else by_tiles.choose(kind, tokens)


def tiling_from_json(data: Mapping[str, Any]) -> LinearTiling:
    """Reads what `to_json` wrote. Raises KeyError or ValueError for anything else."""
    return from_json(_TILINGS[data["source"]], {name: value for name, value in data.items() if name != "source"})
