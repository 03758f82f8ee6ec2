"""The list of work that fa3 reads, where it is short: a block for each piece.

It is all of a plan that fa3's kernels read (BatchPrefillWith…KVCacheSM90Run, FlashInfer 0.6.18). FlashInfer's own plan
(PrefillSM90Plan in its scheduler.cuh) takes the host 150 µs whatever a batch holds, its wrappers' twice as long, and
the GPU waits for it ahead of a prompt. A piece of work is a tile of a request's queries with one head. The plan gives
each block several, so that all blocks take about as long; if there are no more pieces than blocks, nothing is to be
weighed.

Shape legend: R rows, a request each or none; W pieces that the list has room for; B blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_QUERIES, _QUERIES_OF_64 = 128, 192  # of a tile; with heads of 64
_ALIGNMENT = 16  # bytes


class WorkList:
    """Where a list of work lies in FlashInfer's int workspace, and how it is written.

    Attributes:
        layout: what kernels are told of it.
        num_bytes: up to the end of the longest list that is written, of a piece a block.
    """

    def __init__(self, layout: Sequence[int], num_heads: int, head_dim: int, num_blocks: int) -> None:
        """
        Args:
            layout: offsets in bytes, as PrefillPlanSM90Info has them: each piece's tile, its request's first query,
                first page id, queries and keys, and its head, [W] int32 each; bounds of each block's pieces, [B + 1];
                each piece's request, [W].
            num_blocks: B.
        """
        self.layout = list(layout)
        starts = [offset // 4 for offset in layout[:8]]
        self._width = starts[1]  # of the first six arrays: W, aligned
        if starts[:6] != [self._width * index for index in range(6)]:
            raise ValueError(f"expected six arrays of one length behind each other, got offsets {self.layout}")
        self._bounds, self._requests = starts[6:]
        self._heads = np.arange(num_heads, dtype=np.int32)[:, None]
        self._blocks = np.arange(num_blocks + 1, dtype=np.int32)
        self._queries = _QUERIES_OF_64 if head_dim == 64 else _QUERIES
        self.num_bytes = 4 * self._requests + _room(num_blocks + 1)

    @classmethod
    def short(cls, num_heads: int, head_dim: int, num_blocks: int) -> WorkList:
        """A list with room for a piece a block."""
        room = _room(num_blocks + 1)
        return cls([*range(0, 8 * room, room), 0], num_heads, head_dim, num_blocks)

    def write(self, memory: np.ndarray, starts: np.ndarray, first_pages: np.ndarray, num_keys: np.ndarray) -> int:
        """Writes the list.

        Args:
            memory: int32, as long as the layout needs.
            starts: [R + 1] int32, the first query of each row; first_pages: [≥ R] int32, where its page ids start, or
                its keys in a row; num_keys: [R] int32.

        Returns:
            Bytes up to its end; 0: there are more pieces than blocks, and nothing is written.
        """
        lengths = (starts[1:] - starts[:-1]).tolist()
        num_heads, num_blocks = self._heads.size, self._blocks.size - 1
        tiles = [-(-length // self._queries) for length in lengths]
        count = sum(tiles)
        total = count * num_heads
        if total > num_blocks:
            return 0
        rows = zip(starts.tolist(), first_pages[: len(lengths)].tolist(), lengths, num_keys.tolist(), strict=False)
        # Lists: of as few pieces arrays take more than twice as long, and the GPU waits.
        pieces = [(tile, *row, index) for index, row in enumerate(rows) for tile in range(tiles[index])]
        columns = np.array(pieces, dtype=np.int32).reshape(count, 6).T
        arrays = memory[: 6 * self._width].reshape(6, self._width)[:, :total].reshape(6, num_heads, count)
        arrays[:5] = columns[:5, None]
        arrays[5] = self._heads
        memory[self._requests : self._requests + total].reshape(num_heads, count)[:] = columns[5]
        np.minimum(self._blocks, total, out=memory[self._bounds : self._bounds + num_blocks + 1])
        return 4 * max(self._bounds + num_blocks + 1, self._requests + total)


def _room(count: int) -> int:
    """Bytes of so many numbers, as FlashInfer's plan aligns them."""
    return -(-4 * count // _ALIGNMENT) * _ALIGNMENT
