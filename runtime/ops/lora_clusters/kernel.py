"""Divides rows of tokens with adapters among the blocks of clusters and their warps, for norm.cu and shrink.cu.

Shape legend: N columns; r the rank of adapters; R rows of A, of all parts of a linear.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS, CudaKernel
from mllm_compile.runtime.files.json_data import from_json

SPLIT = 8  # blocks of a cluster
_TILE_TOKENS, _GROUP_COLUMNS = 16, 32
_NORM_GROUPS, _SHRINK_GROUPS = 2, (4, 3, 2)  # of columns of a warp: as registers allow; the first that divides them
_MOST_WARPS = 16
_MOST_ROWS = 64
_RANKS = (16, 32)
_MULTIPROCESSOR_BYTES, _BLOCK_BYTES = 228 << 10, 1 << 10  # of shared memory; what a block has of it besides
_MULTIPROCESSOR_THREADS = 512  # of 128 registers each


@dataclass(frozen=True)
class ClusterKernel(CudaKernel):
    """The sizes that norm.cu and shrink.cu share.

    Attributes:
        columns: N.
        a_rows: R.
    """

    headers: ClassVar[tuple[str, ...]] = ("ops/lora_clusters/rows.cuh",)
    switch: ClassVar[str] = "compile.disable_passes: [launch_lora_clusters]"

    columns: int
    a_rows: int

    @property
    @abstractmethod
    def groups(self) -> int:
        """A warp's groups of 32 columns."""

    @property
    def num_threads(self) -> int:
        return 32 * self._warps

    @property
    def shared_bytes(self) -> int:
        factors = self.num_threads * self.a_rows // 8 * self.groups * 16
        return factors + (self._warps + 2) * _TILE_TOKENS * self.a_rows * 4

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Reads what `to_json` wrote. Raises ValueError for anything else."""
        return from_json(cls, {name: value for name, value in data.items() if name != "source"})

    def constants(self) -> dict[str, int]:
        return {
            "N": self.columns,
            "SPLIT": SPLIT,
            "WARPS": self._warps,
            "GROUPS": self.groups,
            "A_ROWS": self.a_rows,
            "RESIDENT": self._resident,
            "SHARED_BYTES": self.shared_bytes,
        }

    @property
    def tokens_at_once(self) -> int:
        """Tokens of a step in which each cluster that runs has a tile."""
        return MULTIPROCESSORS // SPLIT * self._resident * _TILE_TOKENS

    def num_blocks(self, num_tokens: int) -> int:
        return math.ceil(min(num_tokens, self.tokens_at_once) / _TILE_TOKENS) * SPLIT

    @property
    def _warps(self) -> int:
        return self.columns // (SPLIT * self.groups * _GROUP_COLUMNS)

    @property
    def _resident(self) -> int:
        """Blocks of a multiprocessor, as its registers and its memory hold."""
        of_bytes = _MULTIPROCESSOR_BYTES // (self.shared_bytes + _BLOCK_BYTES)
        return max(1, min(_MULTIPROCESSOR_THREADS // self.num_threads, of_bytes))


@dataclass(frozen=True)
class ShrinkKernel(ClusterKernel):
    """Inputs times A."""

    source: ClassVar[str] = "ops/lora_clusters/shrink.cu"
    function: ClassVar[str] = "shrink_in_clusters"

    @property
    def name(self) -> str:
        return f"shrink_in_clusters_{self.a_rows}x{self.columns}"

    @property
    def groups(self) -> int:
        return next(one for one in _SHRINK_GROUPS if _divides(self.columns, one))


@dataclass(frozen=True)
class NormKernel(ClusterKernel):
    """
    Attributes:
        a_rows: of the linear behind the norm.
        rank: of the adapters ahead of it.
        plus_one: 1 is added to the norm's weight.
    """

    source: ClassVar[str] = "ops/lora_clusters/norm.cu"
    function: ClassVar[str] = "norm_in_clusters"

    rank: int
    plus_one: bool = False

    @property
    def name(self) -> str:
        return f"norm_in_clusters_{self.columns}_rank{self.rank}_rows{self.a_rows}{'_plus_one' * self.plus_one}"

    @property
    def groups(self) -> int:
        return _NORM_GROUPS

    @property
    def shared_bytes(self) -> int:
        b_and_weight = self.num_threads * self.groups * (2 * self.rank // 16 + 1) * 16
        return super().shared_bytes + b_and_weight + (self._warps + SPLIT) * _TILE_TOKENS * 4

    def constants(self) -> dict[str, int]:
        return super().constants() | {"RANK": self.rank, "PLUS_ONE": int(self.plus_one)}


def takes_shrink(columns: int, rows: int) -> bool:
    """True if a kernel multiplies inputs of so many columns with so many rows of A."""
    has_groups = any(_divides(columns, groups) for groups in _SHRINK_GROUPS)
    return has_groups and _takes_rows(rows) and _fits(ShrinkKernel(columns, rows))


def takes_norm(columns: int, rank: int, rows: int) -> bool:
    """True if there is a kernel for a norm of so many columns between adapters of this rank and so many rows of A."""
    is_served = _divides(columns, _NORM_GROUPS) and rank in _RANKS and _takes_rows(rows)
    return is_served and _fits(NormKernel(columns, rows, rank))


def _divides(columns: int, groups: int) -> bool:
    warps, left = divmod(columns, SPLIT * groups * _GROUP_COLUMNS)
    return left == 0 and 0 < warps <= _MOST_WARPS


def _takes_rows(rows: int) -> bool:
    return rows % 8 == 0 and 0 < rows <= _MOST_ROWS


def _fits(kernel: ClusterKernel) -> bool:
    return kernel.shared_bytes + _BLOCK_BYTES <= _MULTIPROCESSOR_BYTES
