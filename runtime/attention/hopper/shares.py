"""shares.cu: a batch's keys divided among blocks in equal shares; for many requests. Free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from mllm_compile.runtime.attention.hopper.kernel import DecodeKernel
from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS

TILE = 16  # tokens that are copied together
MOST_REQUESTS = 1024  # of a batch: the tiles of each are counted

_ROW_PADDING = 4  # words of a head on its way (rotation.cuh)
_COLUMNS = 128  # of values, which a warp sums
HEAD_DIMS = (128, 256)

# Of slots of tiles' keys or values, of a multiprocessor's blocks. In bfloat16 this is 4 slots of eight heads; 3 and 6
# are as fast. No block of the next kernel fits beside, for registers.
_RING_BYTES = 128 << 10
_READY = 2  # requests, or parts of them, that are ready at a time


@dataclass(frozen=True)
class _Blocks:
    """How a multiprocessor is filled: with twelve warps, three for each quarter; a further one would take registers
    from all.

    Attributes:
        count: blocks of a multiprocessor.
        preparers: warps of a block that make requests ready for those that compute.
    """

    count: int
    preparers: int


# By a block's warps that compute.
_BLOCKS = {8: _Blocks(1, 3), 4: _Blocks(2, 1), 2: _Blocks(3, 1), 1: _Blocks(4, 1)}


@dataclass(frozen=True)
class ShareKernel(DecodeKernel):
    """The kernel that serves any batch of a layer."""

    headers: ClassVar[tuple[str, ...]] = (
        *DecodeKernel.headers,
        "attention/hopper/plan.cuh",
        "attention/hopper/ready.cuh",
    )
    source: ClassVar[str] = "attention/hopper/shares.cu"
    function: ClassVar[str] = "share_decode"

    @property
    def name(self) -> str:
        return f"shares_{self.heads_name}"

    @property
    def heads(self) -> int:
        """KV heads that a block works at together: as many as it has warps for and divide the cache's."""
        return math.gcd(self.kv_heads, max(_BLOCKS) * _COLUMNS // self.head_dim)

    @property
    def warps(self) -> int:
        """Warps of a block that compute: one for each 128 columns of its heads' values."""
        return self.heads * self.head_dim // _COLUMNS

    @property
    def requests_of_warp(self) -> int:
        """Requests that each of a block's warps counts; those that compute do."""
        return MOST_REQUESTS // self.warps

    @property
    def is_alone(self) -> bool:
        """True if a block fills a multiprocessor."""
        return _BLOCKS[self.warps].count == 1

    @property
    def num_blocks(self) -> int:
        return MULTIPROCESSORS * _BLOCKS[self.warps].count

    @property
    def num_threads(self) -> int:
        return 32 * (self.warps + 1 + _BLOCKS[self.warps].preparers)

    @property
    def shared_bytes(self) -> int:
        """Bytes of the slots and their alignment; barriers; what warps have counted; each request's length and first
        tile; requests that are ready."""
        barriers = 2 * (self.slots + _READY) * 8
        counts = self.warps + 2 * MOST_REQUESTS + 1
        request = 7 + self.heads * (self.group + 2) * (self.head_dim // 2 + _ROW_PADDING)
        words = counts + _READY * request  # the struct ends at a multiple of 8 bytes
        return self.slots * self.slot_bytes + 1024 + barriers + (words + words % 2) * 4

    @property
    def slots(self) -> int:
        """Slots of a block's ring."""
        return _RING_BYTES // _BLOCKS[self.warps].count // self.slot_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a tile's keys."""
        return TILE * self.heads * self.head_bytes

    @property
    def box_panels(self) -> int:
        """Panels of 128 bytes of columns that one copy takes."""
        return self.heads * self.head_bytes // 128

    @property
    def part_floats(self) -> int:
        """Floats that a block's warp leaves to another: 32 lanes' sums, and for each query head that a lane has some of
        what weights are against and their sum (sums.cuh)."""
        return 32 * (_COLUMNS // 8 * 2 + (4 if self.fp8 else 2))

    def constants(self) -> dict[str, int]:
        return {
            **super().constants(),
            "HEADS": self.heads,
            "BLOCKS": _BLOCKS[self.warps].count,
            "MOST_REQUESTS": MOST_REQUESTS,
            "SLOTS": self.slots,
            "PREPARERS": _BLOCKS[self.warps].preparers,
            "READY": _READY,
        }
