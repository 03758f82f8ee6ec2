"""rows.cu and tiles.cu with adapters: what they add to a linear of up to 64 tokens, within the linear's own kernel.

Shape legend: as linear.py; P parts of a packed linear, r the adapters' rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import ClassVar

from mllm_compile.runtime.ops.stream_linear import rows as by_rows
from mllm_compile.runtime.ops.stream_linear import tiles as by_tiles
from mllm_compile.runtime.ops.stream_linear.linear import NORM_ROWS, TOKEN_BUCKETS, LinearKind, LinearTiling
from mllm_compile.runtime.ops.stream_linear.rows import RowTiling
from mllm_compile.runtime.ops.stream_linear.shapes import is_read_in_rows
from mllm_compile.runtime.ops.stream_linear.tiles import TileTiling

MAX_TOKENS = 64  # of a wgmma
MOST_RANK = 32  # of B a lane has four rows in registers
_RANK_UNIT = 16  # of a product of tensor cores
_SHRINK_SPLITS, _LONG_SPLITS, _LONG = 16, 32, 8192  # parts of the inputs: 256 or 384 are a warp's, of 8B
_ROW_HELPERS = 2  # further warps of a block of rows.cu
_MOST_INPUTS = 64  # registers of a lane, as further warps leave fewer
_PARTS = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class AdaptedKind(LinearKind):
    """
    Attributes:
        rank: r.
        parts: the first output and the number of outputs of each part.
    """

    rank: int = 0
    parts: _PARTS = ()

    @property
    def name(self) -> str:
        parts = "_".join(f"{start}x{count}" for start, count in self.parts)
        return f"{super().name}_r{self.rank}_of_{parts}"

    @property
    def a_rows(self) -> int:
        """Rows of an adapter's A."""
        return self.rank * len(self.parts)

    @property
    def shrink_splits(self) -> int:
        """Parts of the inputs that products with A are summed in."""
        return _LONG_SPLITS if self.columns > _LONG else _SHRINK_SPLITS

    @property
    def plain(self) -> LinearKind:
        """The linear without adapters."""
        return LinearKind(*(getattr(self, field.name) for field in fields(LinearKind)))

    def constants(self) -> dict[str, int]:
        return {
            **self.plain.constants(),
            "RANK": self.rank,
            "A_ROWS": self.a_rows,
            "B_ROWS": sum(count for _, count in self.parts),
            "SHRINK_SPLITS": self.shrink_splits,
        }

    def preamble(self) -> str:
        """Functions that find an output's part, and its row of B."""
        of_part, of_row, first = "", "", 0
        for part, (start, count) in enumerate(self.parts):
            of_part += f"output >= {start} && output < {start + count} ? {part} : "
            of_row += f"part == {part} ? output - {start - first} : "
            first += count
        head = "__device__ __forceinline__ int"
        return (
            f"{head} part_of(int output) {{ return {of_part}-1; }}\n"
            f"{head} row_of_b(int output, int part) {{ return {of_row}0; }}\n"
        )


@dataclass(frozen=True)
class AdaptedRowTiling(RowTiling):
    """The division of the linear without adapters; a block has further warps."""

    headers: ClassVar[tuple[str, ...]] = ("ops/stream_linear/adapters.cuh",)

    kind: AdaptedKind

    @cached_property
    def num_threads(self) -> int:
        return 32 * (self.warps + _ROW_HELPERS)

    @cached_property
    def shared_bytes(self) -> int:
        """Bytes of rows.cu's, of A · x and a barrier, and what alignment costs."""
        plain = RowTiling(self.kind.plain, *_division(self, RowTiling))
        return plain.shared_bytes + self.tokens * self.kind.a_rows * 4 + 16 + 16

    def constants(self) -> dict[str, int]:
        return {**super().constants(), "ADAPTED_TOKENS": self.tokens, "HELPERS": _ROW_HELPERS}

    @property
    def lane_inputs(self) -> int:
        """Registers of a lane that have inputs."""
        pieces = math.ceil(self.kind.columns / self.split / self.piece)
        return 4 * pieces * math.ceil(self.piece / by_rows.STEP / self.warps)

    def preamble(self) -> str:
        return super().preamble() + self.kind.preamble()


@dataclass(frozen=True)
class AdaptedTileTiling(TileTiling):
    """The division of the linear without adapters, whose warps for the norm help."""

    headers: ClassVar[tuple[str, ...]] = (*TileTiling.headers, "ops/stream_linear/adapters.cuh")

    kind: AdaptedKind

    @cached_property
    def shared_bytes(self) -> int:
        """Bytes of tiles.cu's, of A · x in bfloat16 and a barrier, and what alignment costs."""
        plain = TileTiling(self.kind.plain, *_division(self, TileTiling))
        return plain.shared_bytes + MAX_TOKENS * self.kind.a_rows * 2 + 16 + 16

    def constants(self) -> dict[str, int]:
        return {**super().constants(), "ADAPTED_TOKENS": self.tokens}

    def preamble(self) -> str:
        return super().preamble() + self.kind.preamble()


AdaptedTiling = AdaptedRowTiling | AdaptedTileTiling


def num_sums(tiling: AdaptedTiling) -> tuple[int, int, int]:
    """The shape of what a kernel has between A and B, float32."""
    return tiling.kind.shrink_splits, tiling.tokens, tiling.kind.a_rows


def takes(rows: int, columns: int, rank: int, parts: _PARTS) -> bool:
    """True if the kernels take adapters of a linear [rows, columns]."""
    if not is_read_in_rows(rows, columns) or rank % _RANK_UNIT or not 0 < rank <= MOST_RANK:
        return False
    if any(number % NORM_ROWS for part in (*parts, (rows,)) for number in part):
        return False
    kind = AdaptedKind(rows, columns, rank=rank, parts=parts)
    few = _by_rows(kind)
    more = [_by_tiles(kind, tokens) for tokens in TOKEN_BUCKETS if by_rows.MAX_TOKENS < tokens <= MAX_TOKENS]
    fit = by_rows.fits(few) and all(tiling.shared_bytes <= by_tiles.BLOCK_BYTES for tiling in more)
    return fit and few.lane_inputs <= _MOST_INPUTS


@cache
def choose(kind: AdaptedKind, tokens: int) -> AdaptedTiling:
    """The tiling for a bucket of tokens: the division of the linear without adapters."""
    return _by_rows(kind) if tokens <= by_rows.MAX_TOKENS else _by_tiles(kind, tokens)


def _by_rows(kind: AdaptedKind) -> AdaptedRowTiling:
    return AdaptedRowTiling(kind, *_division(by_rows.choose(kind.plain), RowTiling))


def _by_tiles(kind: AdaptedKind, tokens: int) -> AdaptedTileTiling:
    return AdaptedTileTiling(kind, *_division(by_tiles.choose(kind.plain, tokens), TileTiling))


def _division(tiling: LinearTiling, of: type[LinearTiling]) -> Iterator[int]:
    """The fields of a tiling but its linear."""
    return (getattr(tiling, field.name) for field in fields(of) if field.name != "kind")


def parts_of(starts: Sequence[int], counts: Sequence[int]) -> _PARTS:
    return tuple(zip(map(int, starts), map(int, counts), strict=True))
