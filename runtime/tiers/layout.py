"""The parts of a page, and of a request's states: what lies where in the device's memory, and where in a slot.

A slot holds all layers of a page together, so that it is copied and stored at once. Shape legend: P pages, or rows of
states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_CHUNK = 32 << 20  # bytes of slots that are registered at once, which launches wait for
ALIGNMENT = 4096  # bytes of a slot: as files that are read past the page cache have it


@dataclass(frozen=True, slots=True)
class Section:
    """One layer's keys, values, or states.

    Attributes:
        rows: [P, n] uint8, over the pool's own memory.
        offset: of its n bytes in a slot.
    """

    rows: torch.Tensor
    offset: int

    @property
    def num_bytes(self) -> int:
        """n."""
        return self.rows.shape[1]


class SlotLayout:
    """The sections of a slot.

    Args:
        pools: tensors [P, …] of pools, contiguous behind the first dimension.

    Attributes:
        sections: in the order of the pools; those without bytes are left out.
        num_bytes: of all sections.
        slot_bytes: what a slot takes; 0 where there is nothing to keep.
        chunk_slots: slots that are registered at once.
    """

    def __init__(self, pools: Sequence[torch.Tensor]) -> None:
        self.sections: list[Section] = []
        self.num_bytes = 0
        for pool in pools:
            if not pool.numel():
                continue
            rows = torch.as_strided(pool, (pool.shape[0], pool[0].numel()), (pool.stride(0), 1)).view(torch.uint8)
            self.sections.append(Section(rows, self.num_bytes))
            self.num_bytes += rows.shape[1]
        self.slot_bytes = -(-self.num_bytes // ALIGNMENT) * ALIGNMENT
        self.chunk_slots = max(1, _CHUNK // max(self.slot_bytes, 1))

    def chunks(self, num_slots: int) -> list[int]:
        """Bytes of each chunk of so many slots."""
        sizes = range(0, num_slots * self.slot_bytes, max(1, self.chunk_slots * self.slot_bytes))
        return [min(self.chunk_slots * self.slot_bytes, num_slots * self.slot_bytes - start) for start in sizes]
