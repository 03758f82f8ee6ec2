"""Which linears the kernel for few tokens on Hopper takes, and how it divides each; free of torch.

Shape legend: N rows and K columns of the weight; of a gated one N counts gate and up rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

KERNEL = "stream_linear"  # the function's name in every binary
MAX_STREAMED_TOKENS = 64
TOKEN_BUCKETS = (8, 16, 32, 64)  # a kernel each; a step takes the first that holds its tokens
NORM_ROWS = 32  # outputs that one sum of squares is of
CAPABILITY = (9, 0)  # wgmma is Hopper's alone
_MULTIPROCESSORS = 132  # of an H100 or H200; tilings fit others too, in waves that may be less full

_TILE_COLUMNS = 64
_MAX_MMA_TOKENS = 16  # by mma.sync; beyond it wgmma is faster
_ROWS_UNIT, _COLUMNS_UNIT = 64, 256  # what weights are multiples of
_SHARED_RING, _WHOLE_RING = 110 << 10, 200 << 10  # two blocks on a multiprocessor, or one
# A weight streams well that all multiprocessors together hold before its inputs are there, or one so large (a head's)
# that each has many blocks, which begin while others end. One between them ends with what only it waits for: with 64
# tokens the linears of an 8B layer took 11 to 56 % longer than cuBLAS, with 8 as long as Triton's kernels.
_HELD_BYTES = _MULTIPROCESSORS * _SHARED_RING
_MANY_ROWS = 65536
_LONG_READ = 256 << 10  # bytes a block beyond which it is worth more to have all the ring than to begin early


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


@dataclass(frozen=True)
class LinearTiling:
    """How one kernel divides a linear. Stored with its binary, which is launched as it was compiled.

    Attributes:
        kind: the linear.
        tokens: one of TOKEN_BUCKETS.
        rows: of the weight, a cluster's.
        split: blocks of a cluster, which divide the columns.
        warp_groups: for wgmma; 0: mma.sync, by warps_n x warps_k warps.
        stages: tiles of the ring.
    """

    kind: LinearKind
    tokens: int
    rows: int
    split: int
    warp_groups: int
    warps_n: int
    warps_k: int
    stages: int

    @property
    def name(self) -> str:
        """Of the binary's file, without its suffix."""
        return f"{self.kind.name}_t{self.tokens}"

    @cached_property
    def num_blocks(self) -> int:
        return self.kind.rows // self.rows * self.split

    @cached_property
    def num_threads(self) -> int:
        """Those that multiply, and a warp that loads."""
        return 32 * ((4 * self.warp_groups or self.warps_n * self.warps_k) + 1)

    @property
    def num_tiles(self) -> int:
        return self.kind.columns // self.split // _TILE_COLUMNS

    @cached_property
    def shared_bytes(self) -> int:
        """Of dynamic shared memory: the ring, later the sums; and what its alignment may cost."""
        return max(self.stages * _stage_bytes(self.rows, self.tokens), self.tokens * (self.rows + 4) * 4) + 1024

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LinearTiling:
        return cls(**{**data, "kind": LinearKind(**data["kind"])})


def bucket_of(num_tokens: int) -> int:
    """Raises ValueError for more than MAX_STREAMED_TOKENS."""
    for tokens in TOKEN_BUCKETS:
        if num_tokens <= tokens:
            return tokens
    raise ValueError(f"{num_tokens} tokens; the kernels take up to {MAX_STREAMED_TOKENS}")


def is_streamed(rows: int, columns: int) -> bool:
    """Whether a weight [rows, columns] divides into the kernels' tiles, and they are the faster for it."""
    divides = rows % _ROWS_UNIT == 0 and columns % _COLUMNS_UNIT == 0 and rows * MAX_STREAMED_TOKENS < 2**31
    return divides and (rows * columns * 2 <= _HELD_BYTES or rows >= _MANY_ROWS)


def num_streamed_norm_blocks(rows: int, columns: int) -> int:
    """How many sums of squares a linear leaves for the norm of its outputs."""
    return rows // NORM_ROWS


def _stage_bytes(rows: int, tokens: int) -> int:
    return (rows + tokens) * _TILE_COLUMNS * 2


def choose_tiling(kind: LinearKind, tokens: int) -> LinearTiling:
    """The tiling that should take the least time, for a bucket of tokens."""
    return min(_tilings(kind, tokens), key=_nanoseconds)


def _tilings(kind: LinearKind, tokens: int) -> Iterator[LinearTiling]:
    is_mma = tokens <= _MAX_MMA_TOKENS
    for rows in (32, 64, 96) if is_mma else (64, 128, 192):
        for split in (1, 2, 4) if is_mma else (1, 2, 4, 8):
            columns = kind.columns // split
            if kind.rows % rows or kind.columns % (split * _TILE_COLUMNS):
                continue
            groups = 0 if is_mma else 1 if columns < 8 * _TILE_COLUMNS else 2
            warps = (2, 4 if split == 1 else 2) if is_mma else (0, 0)
            yield LinearTiling(kind, tokens, rows, split, groups, *warps, _num_stages(rows, columns, tokens, groups))


def _num_stages(rows: int, columns: int, tokens: int, warp_groups: int) -> int:
    """As many as fit; warp groups that take turns at tiles must find theirs in the same slots."""
    is_long = warp_groups > 0 and rows * columns * 2 > _LONG_READ
    most = (_WHOLE_RING if is_long else _SHARED_RING) // _stage_bytes(rows, tokens)
    turns = warp_groups or 1
    return max(turns, min(columns // _TILE_COLUMNS, most) // turns * turns)


def _nanoseconds(tiling: LinearTiling) -> float:
    """A model of the time, which picks what was the fastest, or within 2 %, of what was measured for the linears of
    Qwen3-0.6B and 8B at 8 and 64 tokens on an H200.

    A multiprocessor reads 35 bytes a nanosecond, x from the L2 at a third of the cost, and takes 130 ns a tile at
    least; adding up, once a wave, grows with the split and with what is exchanged.
    """
    waves = math.ceil(tiling.num_blocks / _MULTIPROCESSORS)
    tile = max(130.0, (tiling.rows + 0.3 * tiling.tokens) * _TILE_COLUMNS * 2 / 35)
    exchange = 200 + 60 * tiling.split + tiling.rows * tiling.tokens / 16 if tiling.split > 1 else 0
    return waves * (tiling.num_tiles * tile + exchange)
