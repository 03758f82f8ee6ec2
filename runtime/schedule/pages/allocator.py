"""The free pages of the KV pool. Knows nothing of requests or prefixes: tables.py does. Free of torch."""

from __future__ import annotations

import numpy as np


class TokenToKVPoolAllocator:
    """Hands out the pages 1 … num_pages-1 of a KV pool; page 0 is the dummy that padding writes to, never given.

    A page is `page_size` consecutive KV slots: slot = page * page_size + offset.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        # A stack whose top is the end; the lowest pages are handed out first.
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = num_pages - 1
        self._taken = np.zeros(num_pages, dtype=bool)

    @property
    def usable_pages(self) -> int:
        """All pages but the dummy."""
        return self.num_pages - 1

    @property
    def available_pages(self) -> int:
        return self._num_free

    def allocate(self, count: int) -> np.ndarray:
        """Take `count` pages: [count] int32.

        Raises:
            RuntimeError: fewer are free; PageTables evicts what is missing first, so this is a fault of ours.
        """
        if not 0 <= count <= self._num_free:
            raise RuntimeError(
                f"internal error: {count} KV pages asked of an allocator with {self._num_free} free pages"
            )
        self._num_free -= count
        pages = self._free[self._num_free : self._num_free + count][::-1].copy()
        self._taken[pages] = True
        return pages

    def free(self, pages: np.ndarray) -> None:
        """Take pages back.

        Raises:
            RuntimeError: a page that is not handed out (freed twice, the dummy, out of range), or listed twice;
                nothing is freed then.
        """
        pages = np.asarray(pages, dtype=np.int32)
        if pages.size == 0:
            return
        listed = pages.tolist()  # a request has few: numpy takes longer
        is_known = min(listed) > 0 and max(listed) < self.num_pages and bool(self._taken[pages].all())
        if not is_known or len(set(listed)) != len(listed):
            wrong = [page for page in listed if not 0 < page < self.num_pages or not self._taken[page]]
            raise RuntimeError(
                f"internal error: KV pages {(wrong or listed)[:8]} freed, "
                f"but not handed out or listed twice; pages 1 to {self.num_pages - 1} exist"
            )
        self._taken[pages] = False
        self._free[self._num_free : self._num_free + pages.size] = pages
        self._num_free += pages.size
