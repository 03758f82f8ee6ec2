"""The linears that kernels for few tokens on Hopper compute, and the interface of their divisions; free of torch.

Shape legend: N rows and K columns of the weight; of a gated one N counts gate and up rows.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

from mllm_compile.runtime.cuda.kernel import CudaKernel

# A kernel each; a step takes the first that holds its tokens.
TOKEN_BUCKETS: tuple[int, ...] = (8, 16, 32, 64, 128, *range(144, 257, 16))
MAX_STREAMED_TOKENS = TOKEN_BUCKETS[-1]
# Bytes of a weight that are on their way to a multiprocessor until x is there. Reads arrive in order, 4.4 MB a
# microsecond. Behind whole rings, 200 KB a multiprocessor, x arrives 5 µs after its request, when no other read is
# under way any more. With these no layer that was measured takes longer by more than 0.6 %, and most take less
# (docs/lab/kernels.md).
_EARLY_BYTES = 64 << 10
_MARKS = ("gated", "residual", "bias", "plus_one", "squared_relu", "gelu")
NORM_ROWS = 16  # outputs of a group: one sum of squares is of them, or of one half (lanes.py)


@dataclass(frozen=True)
class LinearKind:
    """The parameters that a kernel is compiled for.

    Attributes:
        rows, columns: N and K.
        norm_blocks: sums of squares a token that it reads; 0: x is taken as it is.
        gated: silu(gate) * up.
        residual: a residual is added.
        next_blocks: sums of squares a token that it leaves for the next norm; 0: no norm.
        bias: one is added; not together with `gated` or `next_blocks`.
        plus_one: the norm behind it multiplies by 1 + its weight.
        squared_relu, gelu: relu(x) ** 2 of its outputs, or gelu(x) by erf; not together with `gated` or `residual`.
    """

    rows: int
    columns: int
    norm_blocks: int = 0
    gated: bool = False
    residual: bool = False
    next_blocks: int = 0
    bias: bool = False
    plus_one: bool = False
    squared_relu: bool = False
    gelu: bool = False

    @property
    def name(self) -> str:
        marks = [mark for mark in _MARKS if getattr(self, mark)]
        norms = [f"norm{self.norm_blocks}", *([f"next{self.next_blocks}"] if self.next_blocks else [])]
        return "_".join([f"{self.rows}x{self.columns}", *norms, *marks])

    def constants(self) -> dict[str, int]:
        """The constants that every kernel's source is given."""
        names = {"rows": "N", "columns": "K"}
        values = {field.name: int(getattr(self, field.name)) for field in fields(self)}
        return {"SCALED": 0, **{names.get(name, name.upper()): value for name, value in values.items()}}

    @property
    def panel(self) -> int:
        """Columns of a panel: what is swizzled together of a row of x, and of a plain weight's."""
        return 64


class Boxes(NamedTuple):
    """The size of a TMA copy: `panels` of 128 bytes of `rows` of the weight, or one of `tokens` of x; 0: x is not read
    so."""

    rows: int
    panels: int
    tokens: int


@dataclass(frozen=True)
class LinearTiling(CudaKernel):
    """The way in which one kernel divides a linear.

    Attributes:
        kind: the linear.
        tokens: the most that it is for, a bucket of its family.
    """

    switch: ClassVar[str] = "compile.disable_passes: [stream_linears]"

    kind: LinearKind
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.kind.name}_t{self.tokens}"

    @property
    @abstractmethod
    def num_blocks(self) -> int: ...

    def boxes(self, num_tokens: int) -> Boxes | None:
        """The boxes of the kernel's TMA reads for `num_tokens`; None: it does not read by TMA."""
        return None


def early_stages(stage_bytes: int, resident: int) -> int:
    """Stages that a block has on their way until x is there, of so many blocks a multiprocessor.

    Args:
        stage_bytes: room of a stage; where that holds inputs of x too, which come later, less of the weight is early.
    """
    return math.ceil(_EARLY_BYTES / resident / stage_bytes)


def bucket_of(num_tokens: int) -> int:
    """The bucket of a number of tokens. Raises ValueError for more than MAX_STREAMED_TOKENS."""
    for tokens in TOKEN_BUCKETS:
        if num_tokens <= tokens:
            return tokens
    raise ValueError(f"{num_tokens} tokens; the kernels take up to {MAX_STREAMED_TOKENS}")
