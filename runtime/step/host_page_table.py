"""The page table of the steps that were launched, on the host: says where a new token's KV goes, without the device.

The scheduler's own table is one step ahead. Free of torch.
"""

from __future__ import annotations

import numpy as np


class HostPageTable:
    """Follows the page writes of ScheduledBatches, in their order.

    Args:
        num_rows: rows of the slot table, the dummy row included.
        max_tokens: most tokens of one row.
    """

    def __init__(self, num_rows: int, max_tokens: int, page_size: int) -> None:
        self.page_size = page_size
        self._table = np.zeros((num_rows, -(-max_tokens // page_size)), dtype=np.int32)

    def write(self, rows: np.ndarray, page_positions: np.ndarray, page_ids: np.ndarray) -> None:
        """page_ids[i] becomes the page_positions[i]-th page of rows[i]; all [N] int."""
        self._table[rows, page_positions] = page_ids

    def places_of(self, rows: np.ndarray, page_positions: np.ndarray) -> np.ndarray:
        """The places [N] int64 of these pages among the pages of all rows, row after row."""
        places: np.ndarray = rows.astype(np.int64) * self._table.shape[1] + page_positions
        return places

    def slots_of(self, page_ids: np.ndarray) -> np.ndarray:
        """[N * page_size] int32: the slots of whole pages [N] int, one page after another."""
        offsets = np.arange(self.page_size, dtype=np.int32)
        return (page_ids.astype(np.int32)[:, None] * self.page_size + offsets).ravel()

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """[T] int64: the KV slot of each token, given its row and position, [T] int each."""
        pages, offsets = np.divmod(positions, self.page_size)
        slots: np.ndarray = self._table[rows, pages].astype(np.int64) * self.page_size + offsets
        return slots

    def page(self, row: int, position: int) -> int:
        """The id of a row's page."""
        return int(self._table[row, position])

    def pages_of(self, rows: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
        """[P] int32: the pages of so many tokens of each row, [R] int each, one row's behind another's."""
        counts = (-(-seq_lens // self.page_size)).tolist()
        return np.concatenate([self._table[row, :count] for row, count in zip(rows.tolist(), counts, strict=True)])

    def first_slot_in_a_row(self, row: int, num_tokens: int) -> int | None:
        """The slot of a row's first token if the slots of its first `num_tokens` follow each other; else None."""
        pages = self._table[row, : -(-num_tokens // self.page_size)]
        follows = int(pages[-1]) - int(pages[0]) == pages.size - 1 and bool((pages[1:] - pages[:-1] == 1).all())
        return int(pages[0]) * self.page_size if follows else None

    def common_pages(self, rows: np.ndarray, most: int) -> int:
        """Number of pages, of the first `most`, that all of `rows` [R ≥ 1] int begin with.

        Rows that share a page share those before it: a page is shared by the prefix cache alone.
        """

        def share(number: int) -> bool:
            column = self._table[rows, number - 1]
            return bool((column == column[0]).all())

        if most == 0 or not share(1):  # most batches
            return 0
        low, high = 1, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if share(middle) else (low, middle - 1)
        return low
