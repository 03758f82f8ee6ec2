"""Prefills whose keys and values are read in a row: where they are so, or copied out of their pages first.

FlashInfer's fa3 reads pages row by row, in tiles of 96 keys. Contiguous keys come by TMA, in tiles of 128, and a block
takes a sixth less time. Pages that follow each other are a row (schedule/pages/allocator.py tries to give a long prompt
such ones). A copy is made layer by layer and read by every block of queries, so with many of these it pays
(prefill_cost.py). All layers and groups use the same memory for it, as they run one after another.

Shape legend: T tokens, H query heads, Hk KV heads, D head dim, K keys of a batch's prefills, S tokens of a page.
"""

from __future__ import annotations

from typing import Any

import torch

# Of keys and values of one layer: 65,536 tokens with 8 KV heads of 128 in 16 bits.
MOST_COPIED_BYTES = 256 << 20


class CopySpace:
    """The memory of the copies.

    Attributes:
        num_bytes: of both copies.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        """
        Args:
            memory: [num_bytes] uint8, finite numbers in any type: masked-out rows are multiplied by 0.
        """
        self._memory = memory
        self.num_bytes = memory.numel()

    def most_tokens(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Tokens that fit, of such heads."""
        return self.num_bytes // (2 * num_kv_heads * head_dim * dtype.itemsize)

    def copy(self, pages: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and the values [K, Hk, D] at `slots` [K] int32, until the next call.

        Args:
            pages: k and v, [pages, S, Hk, D].
        """
        keys, values = (self._copy(cached, slots, half) for cached, half in zip(pages, (0, 1), strict=True))
        return keys, values

    def _copy(self, cached: torch.Tensor, slots: torch.Tensor, half: int) -> torch.Tensor:
        *_, num_heads, head_dim = cached.shape
        rows = cached.view(-1, num_heads * head_dim).view(torch.int64)  # eight bytes at a time
        middle = self._memory.numel() // 2
        place = self._memory[half * middle : (half + 1) * middle].view(torch.int64)
        out = place[: slots.numel() * rows.shape[1]].view(-1, rows.shape[1])
        torch.index_select(rows, 0, slots, out=out)
        return out.view(cached.dtype).view(-1, num_heads, head_dim)


class RowPrefill:
    """The prefill of one prompt whose pages follow each other, planned; runs as a wrapper over pages does."""

    def __init__(self, wrapper: Any, first_slot: int, num_keys: int) -> None:
        """
        Args:
            wrapper: a BatchPrefillWithRaggedKVCacheWrapper, planned for the keys.
            first_slot, num_keys: where the keys are.
        """
        self._wrapper = wrapper
        self._keys = slice(first_slot, first_slot + num_keys)

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, **options: Any) -> Any:
        """q, out: [T, H, D]; pages: k and v, [pages, S, Hk, D]; and as the wrapper's own."""
        keys, values = (cached.flatten(0, 1)[self._keys] for cached in pages)
        return self._wrapper.run(q, keys, values, out=out, **options)


class CopiedPrefill:
    """Runs as a wrapper over pages does, planned."""

    def __init__(self, wrapper: Any, space: CopySpace, slots: torch.Tensor) -> None:
        """
        Args:
            wrapper: a BatchPrefillWithRaggedKVCacheWrapper, planned for the keys at `slots` [K] int32.
        """
        self._wrapper = wrapper
        self._space = space
        self._slots = slots

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, **options: Any) -> Any:
        """q, out: [T, H, D]; pages: k and v, [pages, S, Hk, D]; and as the wrapper's own."""
        return self._wrapper.run(q, *self._space.copy(pages, self._slots), out=out, **options)
