"""The kernels that multiply units of 64 rows (units.cuh), as they are compiled and launched; free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Self

from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.cuda.wgmma import multiply_add_all
from mllm_compile.runtime.files.json_data import from_json

UNIT_ROWS, TILE_UNITS = 64, 4
# In rows: what beginning and ending a tile costs beside its products.
TILE_COST = 40
_ROW_BYTES = 128  # of a stage: 64 columns
_BLOCK_BYTES = 227 << 10
_OTHER_BYTES = 1024 + 256  # what the ring's alignment may cost, and barriers
_NUM_THREADS = 384


class UnitsKernel(CudaKernel):
    """The base of these kernels.

    Attributes:
        rows, columns: of the weight.
        tile_rows: rows of the weight in a tile.
        share: blocks of a cluster, which take the same x.
    """

    headers: ClassVar[tuple[str, ...]] = ("cuda/units.cuh",)

    rows: int
    columns: int
    tile_rows: Any
    share: Any

    @property
    def num_threads(self) -> int:
        return _NUM_THREADS

    @cached_property
    def stages(self) -> int:
        return (_BLOCK_BYTES - _OTHER_BYTES) // self._stage_bytes

    @property
    def shared_bytes(self) -> int:
        return self.stages * self._stage_bytes + _OTHER_BYTES

    @property
    def _stage_bytes(self) -> int:
        stage_bytes: int = (self.tile_rows + TILE_UNITS * UNIT_ROWS) * _ROW_BYTES
        return stage_bytes

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Reads what `to_json` wrote. Raises ValueError for anything else."""
        return from_json(cls, {name: value for name, value in data.items() if name != "source"})

    def constants(self) -> dict[str, int]:
        return {
            "N": self.rows,
            "K": self.columns,
            "UNITS": TILE_UNITS,
            "ROWS": self.tile_rows,
            "SHARE": self.share,
            "STAGES": self.stages,
            "NUM_THREADS": self.num_threads,
            "SHARED_BYTES": self.shared_bytes,
        }

    def preamble(self) -> str:
        return multiply_add_all(self.tile_rows)
