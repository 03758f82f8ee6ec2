"""Divides the products of a gated linear among the multiprocessors, for gated.cu.

Shape legend: N rows (gates, then ups) and K columns of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar

from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS
from mllm_compile.runtime.cuda.units import TILE_COST, TILE_UNITS, UnitsKernel
from mllm_compile.runtime.cuda.units import UNIT_ROWS as UNIT_TOKENS
from mllm_compile.runtime.cuda.wgmma import multiply_registers

_ROWS_UNIT, _COLUMNS_UNIT = 64, 64
_TILE_ROWS = (64, 128, 192)  # at most what registers hold the sums of
_SHARED_ROWS = 192  # x of tiles of so many rows is read once for two of them: 1 to 2 % at 8192 tokens
_EIGHT = 8  # rows of a box, whose swizzle begins anew
LEAST_UNITS = 4  # steps of fewer are stream_linear's
MOST_UNITS = 256  # a step with more takes the fastest of those that fewer take
RANKS = (16, 32)  # of adapters whose B fits in the place of a stage of the weight


@dataclass(frozen=True)
class GatedKernel(UnitsKernel):
    """
    Attributes:
        rows, columns: N and K.
        tile_rows: rows of the weight in a tile.
        rank: of the adapters that it takes with it; 0: none.
    """

    source: ClassVar[str] = "ops/gated_linear/gated.cu"
    function: ClassVar[str] = "gated_linear"
    switch: ClassVar[str] = "compile.disable_passes: [fuse_gated_linear]"

    rows: int
    columns: int
    tile_rows: int
    rank: int = 0

    @property
    def name(self) -> str:
        rank = f"_rank{self.rank}" if self.rank else ""
        return f"gated_{self.rows}x{self.columns}_rows{self.tile_rows}{rank}"

    def constants(self) -> dict[str, int]:
        return {**super().constants(), **({"RANK": self.rank} if self.rank else {})}

    def preamble(self) -> str:
        return super().preamble() + (multiply_registers(self.tile_rows) if self.rank else "")

    @cached_property
    def share(self) -> int:
        """Blocks of a cluster, which work on neighbouring rows of the weight for the same tokens."""
        return 2 if self.tile_rows == _SHARED_ROWS else 1

    def box_tokens(self, num_tokens: int) -> int:
        """Tokens of x that a block of a cluster asks for at a time: as many as it can, none that are not there."""
        division = divided(num_tokens)
        if division.tiles == 1:
            return math.ceil(num_tokens / self.share / _EIGHT) * _EIGHT
        return division.units * UNIT_TOKENS // self.share if division.larger == 0 else UNIT_TOKENS

    def num_blocks(self, num_tokens: int) -> int:
        return min(self._num_sets(num_tokens), self._num_clusters) * self.share

    def cost(self, num_tokens: int) -> float:
        """Estimated cost: of two kernels the cheaper is the faster, as a rule."""
        turns = math.ceil(self._num_sets(num_tokens) / self._num_clusters)
        return turns * (self.tile_rows * divided(num_tokens).mean_units / TILE_UNITS + TILE_COST)

    def _num_sets(self, num_tokens: int) -> int:
        """Sets of tiles; a cluster takes one set at a time."""
        return divided(num_tokens).tiles * math.ceil(self.rows / self.tile_rows / self.share)

    @property
    def _num_clusters(self) -> int:
        """Clusters that run at the same time."""
        return MULTIPROCESSORS // self.share


@dataclass(frozen=True)
class Division:
    """Tokens divided among tiles; the first `larger` tiles have a unit more than `units`; gated.cu's Tokens."""

    tiles: int
    units: int
    larger: int

    @property
    def mean_units(self) -> float:
        return self.units + self.larger / self.tiles


@cache  # asked three times a launch, of some thousands of numbers
def divided(num_tokens: int) -> Division:
    """Divides the tokens among as few tiles as there can be, as evenly as can be."""
    all_units = math.ceil(num_tokens / UNIT_TOKENS)
    tiles = math.ceil(all_units / TILE_UNITS)
    return Division(tiles, *divmod(all_units, tiles))


def gated_kernels(rows: int, columns: int, rank: int = 0) -> tuple[GatedKernel, ...]:
    """The kernels of a gated linear: each is the fastest for some number of tokens."""
    kernels = [GatedKernel(rows, columns, tile_rows, rank) for tile_rows in _TILE_ROWS if tile_rows <= rows]
    return tuple(dict.fromkeys(choose(kernels, units * UNIT_TOKENS) for units in range(LEAST_UNITS, MOST_UNITS + 1)))


def choose(kernels: Iterable[GatedKernel], num_tokens: int) -> GatedKernel:
    """Chooses a weight's fastest kernel for so many tokens."""
    return min(kernels, key=lambda kernel: kernel.cost(num_tokens))


def is_taken(rows: int, columns: int) -> bool:
    """True if a weight [rows, columns] divides into tiles."""
    return rows % _ROWS_UNIT == 0 and columns % _COLUMNS_UNIT == 0


def takes_adapters(rows: int, rank: int, starts: Sequence[int], counts: Sequence[int]) -> bool:
    """True if a kernel takes adapters of this rank with it, whose parts have these outputs: both halves."""
    return rank in RANKS and list(starts) == [0, rows // 2] and list(counts) == [rows // 2] * 2
