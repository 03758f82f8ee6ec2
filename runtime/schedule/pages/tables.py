"""The pages of each running request: the host's page tables over the allocator and the prefix cache.

A row's pages are, in order, its locked path in the prefix cache and then its private ones. If two requests compute the
same prefix at once, one is published first; the other's pages stay private until it is released. So a row's page never
changes under a step in flight, and no request holds a page more than its tokens and drafts need. ../rows.py says which
requests those are.

Pages may be given away while a step that writes them is in flight: steps run in order on one stream, so the next
owner's writes come later. Shape legend: P pages of a row, N page writes. Free of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mllm_compile.runtime.schedule.pages.allocator import TokenToKVPoolAllocator
from mllm_compile.runtime.schedule.pages.page_run import PageRun, Salt
from mllm_compile.runtime.schedule.pages.prefix_cache import RadixCache
from mllm_compile.runtime.schedule.pages.state_snapshots import StateSnapshots

# Tokens of a prompt whose pages are to follow each other: behind fewer, attention gains little by it.
_LONG = 2048
_NONE = np.empty(0, dtype=np.int32)
_NONE.setflags(write=False)


class StatePrefix(NamedTuple):
    """The cached prefix of a request whose model carries states.

    Attributes:
        num_pages: pages whose tokens need not be computed.
        num_matched: pages that are cached, those behind the last state included.
        state_row: row of GDNPool that holds the state after `num_pages`, or None.
    """

    num_pages: int
    num_matched: int
    state_row: int | None


class PageTables:
    """Page tables of `num_rows` rows; the writes made since the last take_writes are what the device lacks."""

    def __init__(
        self,
        num_rows: int,
        max_pages_per_row: int,
        num_pages: int,
        page_size: int,
        num_snapshots: int = 0,
        has_sources: bool = False,
    ) -> None:
        """
        Args:
            num_snapshots: states of prefixes that are kept, in rows of GDNPool behind `num_rows`.
            has_sources: as many rows follow, for what requests' encoder has read.
        """
        self.page_size = page_size
        self.allocator = TokenToKVPoolAllocator(num_pages, page_size)
        self.cache = RadixCache(page_size, StateSnapshots(num_rows, num_snapshots))
        num_rows *= 2 if has_sources else 1
        self.table = np.zeros((num_rows, max_pages_per_row), dtype=np.int32)
        self.num_pages = np.zeros(num_rows, dtype=np.int32)
        self.capacity = np.zeros(num_rows, dtype=np.int32)  # num_pages * page_size, tokens
        self._paths: list[PageRun | None] = [None] * num_rows
        self._path_pages = [0] * num_rows  # length of the path
        self._long = -(-_LONG // page_size)  # pages
        self._runs: dict[int, range | None] = {}  # what is set aside for prompts, by row
        self._writes: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._to_clear: list[np.ndarray] = []

    @property
    def available_pages(self) -> int:
        """Pages that can be had at once: the free ones and those that the cache would give up."""
        return self.allocator.available_pages + self.cache.evictable_pages

    @property
    def held_pages(self) -> int:
        """Pages that requests hold, shared ones counted once."""
        return self.allocator.usable_pages - self.available_pages

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def private_pages(self, row: int) -> int:
        """Pages that can be had again for certain once the row is released."""
        return int(self.num_pages[row]) - self._path_pages[row]

    def attach_prefix(self, row: int, token_ids: np.ndarray, salt: Salt, num_behind: int = 0) -> int:
        """Start an empty row with the longest cached prefix of `token_ids`, locked. Returns its pages.

        Undo it with release. The device's page table hears of it with write_prefix.

        Args:
            num_behind: tokens behind the prefix that are cached, too.
        """
        run, pages = self.cache.match_prefix(token_ids, salt)
        if num_behind and pages.size:
            count = max(0, pages.size - self.pages_for(num_behind))
            run, pages = self.cache.match_prefix(token_ids[: count * self.page_size], salt)
        return self._attach(row, run, pages)

    def attach_state_prefix(self, row: int, token_ids: np.ndarray, salt: Salt) -> StatePrefix:
        """Like attach_prefix, with the longest cached prefix whose state is kept."""
        run, pages, num_matched = self.cache.match_state(token_ids, salt)
        state_row = None if run is None else self.cache.states.use(run)
        return StatePrefix(self._attach(row, run, pages), num_matched, state_row)

    def _attach(self, row: int, run: PageRun | None, pages: np.ndarray) -> int:
        self.cache.lock(run)
        self._paths[row] = run
        self._path_pages[row] = pages.size
        self.table[row, : pages.size] = pages
        self._set_num_pages(row, pages.size)
        return pages.size

    def keep_state(self, token_ids: np.ndarray, salt: Salt, state_row: int) -> PageRun | None:
        """Keep a reserved row as the state after these tokens [n * page_size], whose pages are published; give it back
        where they are not, or have a state. Returns the run that ends with it; None: it was given back."""
        states, run = self.cache.states, self.cache.run_to(token_ids, salt)
        if run is None or run in states:
            states.release(state_row)
            return None
        states.keep(run, state_row)
        return run

    def write_prefix(self, row: int) -> None:
        """Note the row's present pages as writes."""
        count = int(self.num_pages[row])
        if count:
            self._note(row, 0, self.table[row, :count].copy())

    def grow(self, row: int, count: int, whole: int = 0) -> None:
        """Give the row `count` more pages; they must be available.

        Args:
            whole: pages of all of its prompt; a long prompt's pages follow each other where possible.
        """
        if count <= 0:
            return
        start = int(self.num_pages[row])
        pages = self._take_in_a_row(row, start, count, whole) if whole >= self._long else None
        pages = self._take(count) if pages is None else pages
        self.table[row, start : start + count] = pages
        self._set_num_pages(row, start + count)
        self._note(row, start, pages)

    def take_for_load(self, count: int) -> np.ndarray:
        """Take `count` pages [count] int32, which must be available, for what a tier has; one behind the other where
        possible. They are not cleared any more: the copy writes all of them."""
        self._make_free(count)
        run = self.allocator.set_aside(count) if count else None
        pages = None
        if run is not None:
            pages = self.allocator.allocate_behind(run.start - 1, count)
            self.allocator.end_setting_aside(run)
        pages = self.allocator.allocate(count) if pages is None else pages
        self._to_clear = [np.setdiff1d(one, pages) for one in self._to_clear]
        return pages

    def give_back_loaded(self, pages: np.ndarray) -> None:
        """Take back pages of a load that did not arrive; they may hold anything, and are cleared."""
        if pages.size:
            self._to_clear.append(pages.copy())
            self.allocator.free(pages)

    def grow_each(self, rows: np.ndarray) -> None:
        """Give each of the rows [n] one more page; n must be available."""
        if rows.size == 0:
            return
        pages = self._take(rows.size)
        positions = self.num_pages[rows]
        self.table[rows, positions] = pages
        self.num_pages[rows] = positions + 1
        self.capacity[rows] += self.page_size
        self._writes.append((rows, positions, pages))

    def take_writes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The page writes since the last call: rows, positions, page ids, each [N] int32."""
        writes, self._writes = self._writes, []
        if not writes:
            return _NONE, _NONE, _NONE
        if len(writes) == 1:
            return writes[0]
        rows, positions, pages = (np.concatenate(parts) for parts in zip(*writes, strict=True))
        return rows, positions, pages

    def take_cleared(self) -> np.ndarray:
        """Pages [N] int32 given up since the last call that must be zeroed before they serve again."""
        cleared, self._to_clear = self._to_clear, []
        return np.unique(np.concatenate(cleared)) if cleared else _NONE

    def clear_again(self, pages: np.ndarray) -> None:
        """Zero these pages [N] int32 before they serve again: take_cleared gave them to a step that was lost."""
        self._to_clear.append(pages)

    def has_unpublished(self, row: int, num_written: int) -> bool:
        """True if the first `num_written` of the row's tokens fill a page that is not of its path in the cache."""
        return num_written // self.page_size > self._path_pages[row]

    def publish(self, row: int, token_ids: Sequence[int] | np.ndarray, num_written: int, salt: Salt) -> None:
        """Let others reuse the row's full pages: the first `num_written` of its tokens have their KV written.

        Does nothing where another row has published the next page already: to go on below it would lock that page as
        well, and a request that fits alone would no longer do so.
        """
        start, end = self._path_pages[row], num_written // self.page_size
        if end <= start:
            return
        tokens = token_ids[start * self.page_size : end * self.page_size]
        if not self.cache.has_next(self._paths[row], tokens, salt):
            pages = self.table[row, start:end]
            self._paths[row], _ = self.cache.extend(self._paths[row], tokens, pages, salt)
            self._path_pages[row] = end

    def publish_and_release(
        self, row: int, token_ids: Sequence[int] | np.ndarray, num_written: int, salt: Salt
    ) -> PageRun | None:
        """Give up the row's pages, the written full ones to the cache, save those that it has from another row.

        Returns the end of its path in the cache.
        """
        start, end = self._path_pages[row], num_written // self.page_size
        if end > start:
            tokens = token_ids[start * self.page_size : end * self.page_size]
            self._paths[row], duplicates = self.cache.extend(self._paths[row], tokens, self.table[row, start:end], salt)
            self._path_pages[row] = end
            self.allocator.free(duplicates)
        return self.release(row)

    def release(self, row: int) -> PageRun | None:
        """Give up the row's pages: private ones become free, its path's evictable unless others hold them.

        Returns the end of that path.
        """
        run = self._runs.pop(row, None)
        # Single pages are taken elsewhere again, so that the next long prompt finds such a run.
        self.allocator.free(self.table[row, self._path_pages[row] : self.num_pages[row]], to_the_last=run is not None)
        if run is not None:
            self.allocator.end_setting_aside(run)
        end = self._paths[row]
        self.cache.unlock(end)
        self._paths[row] = None
        self._path_pages[row] = 0
        self._set_num_pages(row, 0)
        return end

    def discard(self, row: int) -> None:
        """Like release, for KV that may hold NaN: pages without another user are cleared before they serve again.

        A kernel may read a page to its end: of what is behind a request's last token 0 * NaN would reach it.
        """
        own = [run.pages for run in self.cache.path_of(self._paths[row]) if run.locks == 1]
        private = self.table[row, self._path_pages[row] : self.num_pages[row]].copy()
        self._to_clear += [*own, private]
        self.release(row)

    def discard_own(self, row: int) -> None:
        """Like release, where pages that the row alone has may hold NaN: these are cleared before they serve again."""
        self._to_clear.append(self.table[row, self._path_pages[row] : self.num_pages[row]].copy())
        self.release(row)

    def forget(self, token_ids: Sequence[int] | np.ndarray, salt: Salt) -> None:
        """Stop using the KV of these tokens' first page as a prefix, and all behind it: it may hold NaN."""
        self._to_clear.append(self.cache.forget(token_ids, salt))

    def flush_cache(self) -> None:
        """Forget all cached prefixes; what running requests share stays theirs."""
        self.allocator.free(self.cache.flush())

    def _take(self, count: int) -> np.ndarray:
        self._make_free(count)
        return self.allocator.allocate(count)

    def _take_in_a_row(self, row: int, start: int, count: int, whole: int) -> np.ndarray | None:
        """The `count` pages behind the row's first `start`, or the first of a run; None where others have them."""
        self._make_free(min(whole - start, self.available_pages))  # all will be needed soon
        if start:
            return self.allocator.allocate_behind(int(self.table[row, start - 1]), count)
        run = self._runs[row] = self.allocator.set_aside(whole)
        return None if run is None else self.allocator.allocate_behind(run.start - 1, count)

    def _make_free(self, count: int) -> None:
        shortage = count - self.allocator.available_pages
        if shortage > 0:
            self.allocator.free(self.cache.evict(shortage))

    def _set_num_pages(self, row: int, count: int) -> None:
        self.num_pages[row] = count
        self.capacity[row] = count * self.page_size

    def _note(self, row: int, start: int, pages: np.ndarray) -> None:
        positions = np.arange(start, start + pages.size, dtype=np.int32)
        self._writes.append((np.full(pages.size, row, dtype=np.int32), positions, pages))
