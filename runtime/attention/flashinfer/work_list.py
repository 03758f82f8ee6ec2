"""The lists of work that FlashInfer's kernels read, where they are short: a block for each piece.

A list is all of a plan that a kernel reads (BatchPrefillWith…KVCacheRun and …SM90Run, FlashInfer 0.6.18). FlashInfer's
own plan takes the host 150 µs whatever a batch holds, its wrappers' two to seven times as long, and the GPU waits for
it ahead of a prompt.

fa3 (PrefillSM90Plan in FlashInfer's scheduler.cuh): a piece is a tile of a request's queries with one head. The plan
gives each block several, so that all blocks take about as long. With no more pieces than blocks it weighs nothing.
fa2 with keys divided among blocks (PrefillPlan): a piece is a tile of a request's queries, including the query
heads of a KV head, and a chunk of its keys, for each KV head. Blocks' results of one tile are merged afterwards.

Shape legend: R rows, a request each or none; W pieces that the list has room for; B blocks; T tokens of a step.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

_QUERIES, _QUERIES_OF_64 = 128, 192  # of a tile of fa3's; with heads of 64
_ROWS_OF_FEW, _ROWS = 64, 128  # of a tile of fa2's
_FEW_TOKENS = 64
_LEAST_KEYS = 128  # of a chunk
_ALIGNMENT = 16  # bytes


class WorkList:
    """Where a list of work is in FlashInfer's int workspace, and how it is written.

    Attributes:
        layout: what kernels are told of it.
        num_bytes: up to the end of the longest list that is written, of a piece a block.
    """

    def __init__(self, layout: Sequence[int], num_heads: int, head_dim: int, num_blocks: int) -> None:
        """
        Args:
            layout: offsets in bytes, as PrefillPlanSM90Info has them. Each piece has its tile, its request's first
                query, first page id, queries and keys, and its head, [W] int32 each. Then come bounds of each block's
                pieces, [B + 1], and each piece's request, [W].
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
        end: int = 4 * max(self._bounds + num_blocks + 1, self._requests + total)
        return end


class SplitList:
    """Where a list of work of fa2 is, and how it is written; behind it are the bounds that wrappers keep of a batch.

    Attributes:
        layout: what kernels are told of it, as PrefillPlanInfo has it.
        num_bytes: of all of it.
    """

    def __init__(
        self, num_tokens: int, heads: tuple[int, int, int], page_size: int, num_blocks: int, most_rows: int
    ) -> None:
        """
        Args:
            num_tokens: T.
            heads: query heads, KV heads, head dim.
            num_blocks: that run at once, for all KV heads.
            most_rows: the most of R.
        """
        num_heads, num_kv_heads, head_dim = heads
        self.most_rows = most_rows
        self._group = num_heads // num_kv_heads
        self._page_size = page_size
        # Larger tiles read keys less often; heads of 256 have none.
        self._tile = _ROWS if num_tokens > _FEW_TOKENS and head_dim < 256 else _ROWS_OF_FEW
        self._width = num_blocks // num_kv_heads
        counts = [*[self._width] * 3, most_rows + 1, 1, 1, num_tokens + 1, -(-self._width // 4)]
        counts += [most_rows + 1, most_rows + 1, most_rows]
        ends = np.cumsum([_room(count) for count in counts]).tolist()
        starts = [0, *ends[:-1]]
        self._columns = starts[:3]  # bytes, as are the others
        self._outputs, self._chunk, self._total, self._merges = starts[3:7]
        self._mask = starts[7]
        # By the number of pieces.
        self._are_there = [bytes(row) for row in np.tri(self._width + 1, self._width, -1, dtype=np.uint8)]
        self._bounds = [slice(start // 4, start // 4 + count) for start, count in zip(starts, counts, strict=True)][8:]
        self.num_bytes: int = ends[-1]
        sums = num_heads * self._width * self._tile * head_dim * 4  # of the float workspace, scores behind them
        requests, tiles, chunks = starts[:3]
        self.layout = [self._width, num_tokens, starts[5], self._tile, requests, tiles, chunks, starts[6], starts[3]]
        self.layout += [starts[4], 0, -(-sums // _ALIGNMENT) * _ALIGNMENT, starts[7], 1, 1]

    def bounds(self, numbers: torch.Tensor) -> list[torch.Tensor]:
        """Where each row's queries start, [most_rows + 1], its page ids, likewise, and how many tokens its last page
        has, [most_rows]: parts of the list's memory, int32."""
        return [numbers[place] for place in self._bounds]

    def write(self, memory: np.ndarray, starts: np.ndarray, first_pages: np.ndarray, num_keys: np.ndarray) -> int:
        """Writes the list and the bounds.

        Args:
            memory: [num_bytes / 4] int32.
            starts: [R + 1] int32, the first query of each row; first_pages: [R + 1] int32, where its page ids start;
                num_keys: [R] int32.

        Returns:
            num_bytes; 0: there are more rows or tiles than the list has room for, and nothing is written.
        """
        lengths = (starts[1:] - starts[:-1]).tolist()
        tiles = [-(-length * self._group // self._tile) for length in lengths]
        if len(lengths) > self.most_rows or sum(tiles) > self._width:
            return 0
        bounds = first_pages.tolist()
        pages = [end - start for start, end in itertools.pairwise(bounds)]
        chunk = self._pages_of_chunk(tiles, pages)
        # Lists, as in WorkList: the GPU waits.
        rows: list[int] = []
        row_tiles: list[int] = []
        row_chunks: list[int] = []
        outputs, merges = [0], [0]
        for row, (count, num_pages) in enumerate(zip(tiles, pages, strict=True)):
            num_chunks = -(-num_pages // chunk)
            for tile in range(count):
                rows += [row] * num_chunks
                row_tiles += [tile] * num_chunks
                row_chunks += range(num_chunks)
            merges += range(merges[-1] + num_chunks, merges[-1] + num_chunks * lengths[row] + 1, num_chunks)
            outputs.append(merges[-1])
        num_left = self.most_rows - len(pages)
        parts = [
            *zip(self._columns, (rows, row_tiles, row_chunks), strict=True),
            (self._outputs, outputs),
            (self._merges, merges),
            (self._chunk, [chunk * self._page_size]),
            (self._total, [len(merges) - 1]),
            (4 * self._bounds[0].start, starts.tolist() + [len(merges) - 1] * num_left),
            (4 * self._bounds[1].start, bounds + bounds[-1:] * num_left),  # whose last one bounds all page ids
            (4 * self._bounds[2].start, [(n - 1) % self._page_size + 1 for n in num_keys.tolist()] + [0] * num_left),
        ]
        block = memory.data.cast("B")
        for start, numbers in parts:
            struct.pack_into(f"{len(numbers)}i", block, start, *numbers)
        block[self._mask : self._mask + self._width] = self._are_there[len(rows)]
        return self.num_bytes

    def _pages_of_chunk(self, tiles: list[int], pages: list[int]) -> int:
        """Pages of a chunk: as few as give no more pieces than there is room for."""

        def fits(chunk: int) -> bool:
            return sum(n * -(-count // chunk) for n, count in zip(tiles, pages, strict=True)) <= self._width

        low, high = max(1, _LEAST_KEYS // self._page_size), max(pages)
        while low < high and not fits(low):
            middle = (low + high) // 2
            low, high = (low + 1, middle) if fits(middle) else (middle + 1, high)
        return low


def _room(count: int) -> int:
    """Bytes of so many numbers, as FlashInfer's plan aligns them."""
    return -(-4 * count // _ALIGNMENT) * _ALIGNMENT
