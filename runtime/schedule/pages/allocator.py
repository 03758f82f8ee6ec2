"""The free pages of the KV pool. Knows nothing of requests or prefixes: tables.py does. Free of torch.

Attention reads pages that follow each other faster than others (attention/flashinfer/copied.py). So a run of pages can
be reserved for a long prompt, which takes them a chunk at a time. Others take them too when no page is left.
"""

from __future__ import annotations

import numpy as np

_LOOKED_AT = 256  # of what is listed, where not all of it is free


class TokenToKVPoolAllocator:
    """Hands out the pages 1 … num_pages-1 of a KV pool; page 0 is the dummy that padding writes to, never given.

    A page is `page_size` consecutive KV slots: slot = page * page_size + offset.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        # The free pages, the next one last; the lowest pages are handed out first. Pages are added at either end, and
        # taken from the last or from anywhere. Entries of taken pages are ignored until the rest is moved up (_tidy). A
        # first token waits for pages, and all others are many.
        self._listed = np.zeros(3 * num_pages, dtype=np.int32)
        self._first = self._end = num_pages
        self._place = np.full(num_pages, -1, dtype=np.int64)  # by page: where it is listed, -1 while it is handed out
        self._num_free = num_pages - 1
        self._list(np.arange(num_pages - 1, 0, -1, dtype=np.int32), num_pages)
        self._end += num_pages - 1
        self._is_set_aside = np.zeros(num_pages, dtype=bool)

    @property
    def usable_pages(self) -> int:
        """All pages but the dummy."""
        return self.num_pages - 1

    @property
    def available_pages(self) -> int:
        return self._num_free

    @property
    def taken(self) -> np.ndarray:
        """[num_pages] bool: those that are handed out."""
        taken = self._place < 0
        taken[0] = False
        return taken

    def allocate(self, count: int) -> np.ndarray:
        """Take `count` pages: [count] int32.

        Raises:
            RuntimeError: fewer are free; PageTables evicts what is missing first, so this is a fault of ours.
        """
        if not 0 <= count <= self._num_free:
            raise RuntimeError(
                f"internal error: {count} KV pages asked of an allocator with {self._num_free} free pages"
            )
        if self._end - self._first == self._num_free:  # all that is listed is free
            pages = self._listed[self._end - count : self._end][::-1].copy()
            self._end -= count
        else:
            pages = self._last(count)
        self._take(pages)
        return pages

    def allocate_behind(self, page: int, count: int) -> np.ndarray | None:
        """Take the `count` pages that follow `page`: [count] int32; None: one of them is not free."""
        if page + count >= self.num_pages or (self._place[page + 1 : page + 1 + count] < 0).any():
            return None
        pages = np.arange(page + 1, page + 1 + count, dtype=np.int32)
        self._take(pages)
        return pages

    def set_aside(self, count: int) -> range | None:
        """Set the last `count` free pages aside that follow each other; None: there are no such.

        The last, as single pages are handed out from the first on.
        """
        is_free = (self._place >= 0) & ~self._is_set_aside
        edges = np.flatnonzero(np.diff(is_free, prepend=False, append=False))
        firsts, ends = edges[::2], edges[1::2]
        fitting = np.flatnonzero(ends - firsts >= count)
        if not fitting.size:
            return None
        end = int(ends[fitting[-1]])
        self._is_set_aside[end - count : end] = True
        return range(end - count, end)

    def end_setting_aside(self, pages: range) -> None:
        """Let pages that were set aside be so for another."""
        self._is_set_aside[pages.start : pages.stop] = False

    def free(self, pages: np.ndarray, to_the_last: bool = False) -> None:
        """Take pages back.

        Args:
            to_the_last: they are handed out after all that are free now.

        Raises:
            RuntimeError: a page that is not handed out (freed twice, the dummy, out of range), or listed twice;
                nothing is freed then.
        """
        pages = np.asarray(pages, dtype=np.int32)
        if pages.size == 0:
            return
        listed = pages.tolist()  # a request has few: numpy takes longer
        is_known = min(listed) > 0 and max(listed) < self.num_pages and bool((self._place[pages] < 0).all())
        if not is_known or len(set(listed)) != len(listed):
            wrong = [page for page in listed if not 0 < page < self.num_pages or self._place[page] >= 0]
            raise RuntimeError(
                f"internal error: KV pages {(wrong or listed)[:8]} freed, "
                f"but not handed out or listed twice; pages 1 to {self.num_pages - 1} exist"
            )
        if pages.size > min(self._first, self._listed.size - self._end):
            self._tidy()
        if to_the_last:
            self._first -= pages.size
            self._list(pages, self._first)
        else:
            self._list(pages, self._end)
            self._end += pages.size
        self._num_free += pages.size

    def _take(self, pages: np.ndarray) -> None:
        self._place[pages] = -1
        self._num_free -= pages.size

    def _list(self, pages: np.ndarray, place: int) -> None:
        self._listed[place : place + pages.size] = pages
        self._place[pages] = np.arange(place, place + pages.size)

    def _last(self, count: int) -> np.ndarray:
        """The last `count` pages that are free, the last one first; takes them off the list."""
        parts = [np.empty(0, dtype=np.int32)]
        looked_at = max(count, _LOOKED_AT)
        while count:
            start = max(self._first, self._end - looked_at)
            places = start + np.flatnonzero(self._is_free(start))[-count:]
            parts.append(self._listed[places][::-1])
            count -= places.size
            self._end = start if count else int(places[0])
            looked_at *= 2  # whole runs may have gone
        return np.concatenate(parts)

    def _is_free(self, start: int) -> np.ndarray:
        """True for what is listed from `start` on and free."""
        is_free: np.ndarray = self._place[self._listed[start : self._end]] == np.arange(start, self._end)
        return is_free

    def _tidy(self) -> None:
        """Lists the free pages alone, with room for all others at either end."""
        free = self._listed[self._first : self._end][self._is_free(self._first)]
        self._first, self._end = self.num_pages, self.num_pages + free.size
        self._list(free, self._first)
