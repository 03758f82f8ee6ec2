"""The pages whose keys a drafter has written, by their ids: a prefix hit brings those of others, which may lack some.

A page counts as written while it holds what the drafter made of the tokens whose keys the model has there. Free of
torch.
"""

from __future__ import annotations

import numpy as np

from mllm_compile.runtime.step.host_page_table import HostPageTable


class WrittenPages:
    """Follows the pages of the rows of a table."""

    def __init__(self, num_pages: int, pages: HostPageTable) -> None:
        """Args: num_pages: of the drafter's pool, the dummy page included."""
        self._pages = pages
        self._is_written = np.zeros(num_pages, dtype=bool)

    def begin(self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """The model writes tokens starts to ends of these rows, [R] int each: pages that begin there are new."""
        size = self._pages.page_size
        firsts, lasts = -(-starts // size), -(-ends // size)
        for index in np.flatnonzero(lasts > firsts).tolist():
            pages = self._pages.pages_of(rows[index : index + 1], ends[index : index + 1])
            self._is_written[pages[int(firsts[index]) :]] = False

    def end(self, row: int, num_tokens: int) -> None:
        """The drafter has the keys of the first tokens of a row. Calls with the same pages cost next to nothing."""
        count = num_tokens // self._pages.page_size
        if count and not self._is_written[self._pages.page(row, count - 1)]:
            self._is_written[self._whole_pages(row, num_tokens)] = True

    def clear(self, page_ids: np.ndarray) -> None:
        """These pages hold no keys any more."""
        self._is_written[page_ids] = False

    def num_written(self, row: int, num_tokens: int) -> int:
        """Tokens, of the first `num_tokens` of a row, up to the first page that lacks keys."""
        lacks = ~self._is_written[self._whole_pages(row, num_tokens)]
        return int(lacks.argmax()) * self._pages.page_size if lacks.any() else num_tokens

    def _whole_pages(self, row: int, num_tokens: int) -> np.ndarray:
        size = self._pages.page_size
        return self._pages.pages_of(np.array([row]), np.array([num_tokens // size * size]))
