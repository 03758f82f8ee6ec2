"""The linears that kernels for few tokens on Hopper compute, and what every way of dividing one says; free of torch.

Shape legend: N rows and K columns of the weight; of a gated one N counts gate and up rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

KERNEL = "stream_linear"  # the function's name in every binary
TOKEN_BUCKETS = (8, 16, 32, 64)  # a kernel each; a step takes the first that holds its tokens
MAX_STREAMED_TOKENS = TOKEN_BUCKETS[-1]
CAPABILITY = (9, 0)  # wgmma is Hopper's alone
MULTIPROCESSORS = 132  # of an H100 or H200; tilings fit others too, in waves that may be less full


@dataclass(frozen=True)
class LinearKind:
    """What a kernel is compiled for.

    Attributes:
        rows, columns: N and K.
        norm_blocks: sums of squares a token that it reads; 0: x is taken as it is.
        gated: silu(gate) * up.
        residual: a residual is added.
        norm_next: what the norm behind it wants is written too.
    """

    rows: int
    columns: int
    norm_blocks: int = 0
    gated: bool = False
    residual: bool = False
    norm_next: bool = False

    @property
    def name(self) -> str:
        marks = [mark for mark in ("gated", "residual", "norm_next") if getattr(self, mark)]
        return "_".join([f"{self.rows}x{self.columns}", f"norm{self.norm_blocks}", *marks])

    def constants(self) -> dict[str, int]:
        """What every kernel's source is given of it."""
        names = {"rows": "N", "columns": "K"}
        return {names.get(field.name, field.name.upper()): int(getattr(self, field.name)) for field in fields(self)}


@dataclass(frozen=True)
class LinearTiling(ABC):
    """How one kernel divides a linear. Stored with its binary, which is launched as it was compiled.

    Attributes:
        source: the file of its kernel.
        kind: the linear.
        tokens: one of TOKEN_BUCKETS.
    """

    source: ClassVar[str]

    kind: LinearKind
    tokens: int

    @property
    def name(self) -> str:
        """Of the binary's file, without its suffix."""
        return f"{self.kind.name}_t{self.tokens}"

    @property
    @abstractmethod
    def num_blocks(self) -> int: ...

    @property
    @abstractmethod
    def num_threads(self) -> int:
        """Of a block."""

    @property
    @abstractmethod
    def shared_bytes(self) -> int:
        """Of dynamic shared memory, a block's."""

    @abstractmethod
    def constants(self) -> dict[str, int]:
        """What its source is given beside the kind's."""

    def to_json(self) -> dict[str, Any]:
        return {"source": self.source, **asdict(self)}


def bucket_of(num_tokens: int) -> int:
    """Raises ValueError for more than MAX_STREAMED_TOKENS."""
    for tokens in TOKEN_BUCKETS:
        if num_tokens <= tokens:
            return tokens
    raise ValueError(f"{num_tokens} tokens; the kernels take up to {MAX_STREAMED_TOKENS}")
