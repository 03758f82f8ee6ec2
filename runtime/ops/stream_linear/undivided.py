"""The kernels of few rows whose sums have the order of products of many: no block divides a product's inputs.

tiles.cu with clusters of one block adds up 16 inputs at a time, first to last, in one accumulator. So do gated.cu and
cuBLASLt without split-K. A compile compares their bits (mllm_compile/check/few_rows.py). Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import ClassVar

from mllm_compile.runtime.config_sections import LEAST_ROWS
from mllm_compile.runtime.ops.stream_linear.linear import TOKEN_BUCKETS, LinearKind
from mllm_compile.runtime.ops.stream_linear.tiles import TileTiling, divided, with_panels

# 64 rows too: for each linear of 8B the library takes 2 to 16 % longer (H200, 6c547630).
BUCKETS = tuple(tokens for tokens in TOKEN_BUCKETS if tokens <= LEAST_ROWS)
_UNIT = 64  # what rows and columns are multiples of
# A narrow tile's products take less time than a wait for a stage: with four panels of 64 inputs in place of two 8B's o
# takes 9.6 µs in place of 10.7 (1 row), 0.6B's down 4.8 in place of 5.7 (H200, ef29fe60).
_NARROW_ROWS, _PANELS = 32, 4
_MOST_AHEAD = 20 << 20  # of an L2 of 50 MB, which others need too


@dataclass(frozen=True)
class UndividedTiling(TileTiling):
    """A tiling of clusters of one block.

    Attributes:
        ahead_bytes: of the next linear's weight, which it asks into the L2 while it waits for its inputs.
    """

    ahead_bytes: int = 0

    switch: ClassVar[str] = "compile.disable_passes: [sum_in_one_order]"

    @property
    def name(self) -> str:
        return f"{super().name}_undivided" + (f"_ahead{self.ahead_bytes}" if self.ahead_bytes else "")

    def constants(self) -> dict[str, int]:
        return {**super().constants(), "AHEAD_BYTES": self.ahead_bytes}


@cache
def choose_undivided(kind: LinearKind, tokens: int, ahead_bytes: int = 0) -> UndividedTiling:
    """The tiling for a bucket of tokens."""
    tiling = divided(kind, tokens, 1)
    if tiling.rows <= _NARROW_ROWS and kind.columns % (_PANELS * _UNIT) == 0:
        tiling = with_panels(tiling, _PANELS)
    return UndividedTiling(
        **{field.name: getattr(tiling, field.name) for field in fields(tiling)}, ahead_bytes=ahead_bytes
    )


def bytes_ahead(rows: int, columns: int) -> int:
    """Bytes of a weight [rows, columns] that the linear ahead of it asks into the L2."""
    return min(2 * rows * columns, _MOST_AHEAD)


def is_taken(rows: int, columns: int) -> bool:
    """True if a weight [rows, columns] divides into tiles."""
    return rows % _UNIT == 0 and columns % _UNIT == 0 and rows * BUCKETS[-1] < 2**31
