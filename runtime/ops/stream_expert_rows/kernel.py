"""The layout of the kernel: a ring of stages in shared memory, and what is behind it.

Shape legend: E experts, k experts a token, N rows and K columns of an expert's weight, B rows of a block of `order`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS, CudaKernel
from mllm_compile.runtime.ops.experts.shapes import ONE_ROW

_ROWS, _EIGHT = 16, 8  # of a weight and of x that a product takes
_WARPS = (8, 12)  # that may multiply
_OTHER_WARPS = 2  # one adds up, one asks for weights
_BUFFERS = 3  # of sums
_MULTIPROCESSOR_BYTES, _RESERVED_BYTES = 228 << 10, 1 << 10  # of shared memory; of that, a block's of the system
_MOST_STAGES = 16
_SCALED = 32  # inputs of a scale
_QUAD = 4 * _SCALED  # inputs of a warp at once
_MOST_COLUMNS = 3072  # a warp has its inputs of 16 rows in registers
_BLOCKS = (ONE_ROW, 16)
_MOST_BLOCKS = 512


@dataclass(frozen=True)
class ExpertRowsKernel(CudaKernel):
    """
    Attributes:
        experts, chosen: E and k.
        rows, columns: N and K.
        block: B.
        of_tokens: rows of x are tokens.
        swiglu: pairs of outputs are a gate and an up.
        bias: one is added.
        early: the order is of a kernel before the one that makes x.
    """

    source: ClassVar[str] = "ops/stream_expert_rows/rows.cu"
    headers: ClassVar[tuple[str, ...]] = ("ops/stream_quantised/e2m1.cuh",)
    function: ClassVar[str] = "expert_rows"
    switch: ClassVar[str] = "compile.disable_passes: [stream_expert_rows]"

    experts: int
    chosen: int
    rows: int
    columns: int
    block: int
    of_tokens: bool
    swiglu: bool
    bias: bool
    early: bool

    @property
    def name(self) -> str:
        marks = "".join(f"_{mark}" for mark in ("of_tokens", "swiglu", "bias", "early") if getattr(self, mark))
        return f"expert_rows_{self.experts}x{self.chosen}_{self.rows}x{self.columns}_of_{self.block}{marks}"

    @property
    def num_blocks(self) -> int:
        return MULTIPROCESSORS * self._resident

    @property
    def num_threads(self) -> int:
        return 32 * (self._warps + _OTHER_WARPS)

    @property
    def _warps(self) -> int:
        """Warps that multiply: of 16 rows as many as have fewest turns each; of one row two blocks share registers."""
        if self.block == ONE_ROW:
            return _WARPS[0]
        return min(_WARPS, key=lambda warps: -(-self.columns // (_QUAD * warps)))

    @property
    def _resident(self) -> int:
        """Blocks of a multiprocessor. With one where two have room, some get two and others none."""
        return 2 if self.block == ONE_ROW else 1

    @property
    def _stage_bytes(self) -> int:
        bytes_of_row = self.columns // 2 + self.columns // _SCALED + (2 if self.bias else 0)
        return -(-_ROWS * bytes_of_row // 128) * 128

    @property
    def _other_bytes(self) -> int:
        """Bytes beside stages and their barriers: sums and theirs, counts of warps, blocks that an expert has."""
        eights = 1 if self.block == ONE_ROW else self.block // _EIGHT
        buffer = self._warps * eights * _EIGHT * _ROWS * 4 + 2 * 8
        return -(-(_BUFFERS * buffer + (self._warps + _OTHER_WARPS + 1) * 4 + 3 * 2 * _MOST_BLOCKS) // 8) * 8

    @cached_property
    def stages(self) -> int:
        room = _MULTIPROCESSOR_BYTES // self._resident - _RESERVED_BYTES - self._other_bytes
        return min(_MOST_STAGES, room // (self._stage_bytes + 2 * 8))

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self._stage_bytes + 2 * 8) + self._other_bytes

    def constants(self) -> dict[str, int]:
        return {
            "EXPERTS": self.experts,
            "CHOSEN": self.chosen,
            "N": self.rows,
            "K": self.columns,
            "BLOCK": self.block,
            "OF_TOKENS": int(self.of_tokens),
            "SWIGLU": int(self.swiglu),
            "BIAS": int(self.bias),
            "EARLY": int(self.early),
            "FACTORS": 0,
            "WARPS": self._warps,
            "RESIDENT": self._resident,
            "STAGES": self.stages,
            "BUFFERS": _BUFFERS,
            "MOST_BLOCKS": _MOST_BLOCKS,
            "SHARED_BYTES": self.shared_bytes,
        }


def is_taken(experts: int, chosen: int, rows: int, columns: int, block: int) -> bool:
    """True if there is a kernel for experts' weights [E, N, K] in MXFP4, and blocks as `rows_of_block` has them."""
    is_weight = rows % _ROWS == 0 and columns % _SCALED == 0 and columns <= _MOST_COLUMNS
    # A block has twice the rows that an expert gets: so 16 are of at most 8 E rows. Each expert's last may not be full.
    most_blocks = max(chosen, (8 * experts + 15 * (experts + 1)) // 16)
    return is_weight and block in _BLOCKS and most_blocks <= _MOST_BLOCKS
