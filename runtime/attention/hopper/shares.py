"""shares.cu: a batch's keys divided among multiprocessors in equal shares; for many requests. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mllm_compile.runtime.attention.hopper.kernel import HEAD_DIM, DecodeKernel
from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS

HEADS = 8  # KV heads that a block works at together, a warp each
TILE = 16  # tokens that are copied together
MOST_REQUESTS = 1024  # of a batch: the tiles of each are counted

_ROW_WORDS = HEAD_DIM // 2 + 4  # of a head on its way (rotation.cuh)

# Of slots of tiles' keys or values. In bfloat16, of which this is 4 slots, with 3 and 6 it is as fast; no block of the
# next kernel fits beside, for registers.
_RING_BYTES = 128 << 10
# Warps that make requests ready for those that compute. With these a multiprocessor's quarters have three warps each: a
# further one would take registers from all.
_PREPARERS = 3
_READY = 2  # requests, or parts of them, that are ready at a time


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
    def num_blocks(self) -> int:
        return MULTIPROCESSORS

    @property
    def num_threads(self) -> int:
        return 32 * (HEADS + 1 + _PREPARERS)

    @property
    def shared_bytes(self) -> int:
        """Bytes of the slots and their alignment; barriers; what warps have counted; each request's length and first
        tile; requests that are ready."""
        barriers = 2 * (self.slots + _READY) * 8
        counts = HEADS + 2 * MOST_REQUESTS + 1
        request = 5 + HEADS * (self.group + 2) * _ROW_WORDS
        words = counts + _READY * request
        return _RING_BYTES + 1024 + barriers + (words + words % 2) * 4  # their struct ends at a multiple of 8 bytes

    @property
    def slots(self) -> int:
        """Slots of the ring."""
        return _RING_BYTES // (TILE * HEADS * self.head_bytes)

    @property
    def box_panels(self) -> int:
        """Panels of 128 bytes of columns that one copy takes."""
        return HEADS * self.head_bytes // 128

    @property
    def part_floats(self) -> int:
        """Floats that a block leaves to another: for each head, 32 lanes' sums, largest logits and totals."""
        return 32 * (HEAD_DIM // 8 * 2 + 2)

    def constants(self) -> dict[str, int]:
        return {
            **super().constants(),
            "MOST_REQUESTS": MOST_REQUESTS,
            "SLOTS": self.slots,
            "PREPARERS": _PREPARERS,
            "READY": _READY,
        }


def takes(num_kv_heads: int) -> bool:
    """True if KV heads divide into eights."""
    return num_kv_heads % HEADS == 0
