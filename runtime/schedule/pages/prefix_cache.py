"""Radix tree over full KV pages: which prefixes of tokens have their KV in which pages.

Owns the pages of its runs until it evicts them. tables.py and ../rows.py know which pages a request holds privately,
and when KV counts as written. Free of torch.

A node is a *run* of pages (page_run.py) that were published together, and is divided where a prefix ends in its midst
or goes on otherwise. So a prefix of thousands of pages is found and locked in a few comparisons: a first token waits
for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mllm_compile.runtime.schedule.pages.eviction_order import BiasedOrder, insert_behind, remove
from mllm_compile.runtime.schedule.pages.page_keys import PageKeys
from mllm_compile.runtime.schedule.pages.page_run import PageRun, Salt
from mllm_compile.runtime.schedule.pages.sessions import Sessions
from mllm_compile.runtime.schedule.pages.state_snapshots import StateSnapshots
from mllm_compile.runtime.schedule.pages.watch import CacheWatcher

_NO_PAGES = np.empty(0, dtype=np.int32)
_NO_PAGES.setflags(write=False)


class RadixCache:
    """Prefixes by full pages, one tree for each salt, evicted by least recent use.

    Locks are counted along paths, so a locked run's ancestors are locked and every unlocked run's descendants are
    unlocked: all unlocked pages can be evicted. `_unlocked` is ordered by last use and by sessions, and its first run
    is a leaf; a leaf's last pages are given up first.

    Attributes:
        sessions: those of requests, which bias the order.
        watchers: told of runs that come and go.
    """

    def __init__(self, page_size: int, states: StateSnapshots | None = None) -> None:
        """Args: states: after the last pages of runs, for models whose layers carry one."""
        self.page_size = page_size
        self.states = states or StateSnapshots()
        self.watchers: list[CacheWatcher] = []
        self._keys: PageKeys | None = None
        self._roots: dict[Salt, PageRun] = {}
        self._unlocked = BiasedOrder(lambda: PageRun.root(()), PageRun.any_child)
        self.sessions: Sessions[PageRun] = Sessions(self._move)
        self._num_pages = 0
        self._num_unlocked = 0

    @property
    def num_pages(self) -> int:
        """Pages that the cache owns."""
        return self._num_pages

    @property
    def evictable_pages(self) -> int:
        """Cached pages without a request's lock on them."""
        return self._num_unlocked

    def use_keys(self, secret: bytes) -> PageKeys:
        """The keys of the cache's pages; all watchers use the same, which the first one's secret makes."""
        if self._keys is None:
            self._keys = PageKeys(secret, self.page_size)
        return self._keys

    def match_prefix(self, token_ids: np.ndarray, salt: Salt = ()) -> tuple[PageRun | None, np.ndarray]:
        """The longest cached prefix of `token_ids` [n] int64 in full pages: the run that ends with it (None: no hit)
        and its pages.

        Takes no lock: lock the run before anything else may evict it. A run that it ends in the midst of is divided
        there.
        """
        root = self._roots.get(salt)
        if root is None:
            return None, _NO_PAGES
        run, rest, parts = root, _as_array(token_ids), []
        while (child := run.children.get(self._key_of(rest))) is not None:
            run = self._start_of(child, rest)
            parts.append(run.pages)
            rest = rest[run.token_ids.size :]
        if not parts:
            return None, _NO_PAGES
        return run, parts[0] if len(parts) == 1 else np.concatenate(parts)

    def match_state(self, token_ids: np.ndarray, salt: Salt = ()) -> tuple[PageRun | None, np.ndarray, int]:
        """The longest cached prefix that has a state: the run that ends with it (None: no hit), its pages, and the
        number of pages that are cached without regard to states."""
        run, pages = self.match_prefix(token_ids, salt)
        matched = depth = pages.size
        while depth and run is not None and run not in self.states:
            depth -= run.pages.size
            run = run.parent
        return (run if depth else None), pages[:depth], matched

    def run_to(self, token_ids: np.ndarray, salt: Salt = ()) -> PageRun | None:
        """The run that ends with the tokens [n * page_size] int64; None: they are not all cached."""
        run, pages = self.match_prefix(token_ids, salt)
        return run if pages.size * self.page_size == token_ids.size else None

    def lock(self, run: PageRun | None) -> None:
        """Keep the path to `run` from eviction until it is unlocked as often."""
        while run is not None and (parent := run.parent) is not None:
            self._lock_run(run)
            run = parent

    def unlock(self, run: PageRun | None) -> None:
        """Give one lock back; the path counts as used now."""
        while run is not None and run.parent is not None:
            if run.locks <= 0:
                page = run.pages[0]
                raise RuntimeError(f"internal error: the prefix cache's page {page} was unlocked once too often")
            run.locks -= 1
            if run.locks == 0:
                self._unlocked.append(run)
                self._num_unlocked += run.pages.size
            run = run.parent

    def has_next(self, run: PageRun | None, token_ids: Sequence[int] | np.ndarray, salt: Salt = ()) -> bool:
        """True if the first page of `token_ids` is in the tree right below `run` (None: the root)."""
        at = run if run is not None else self._roots.get(salt)
        return at is not None and self._key_of(_as_array(token_ids)) in at.children

    def extend(
        self,
        run: PageRun | None,
        token_ids: Sequence[int] | np.ndarray,
        pages: np.ndarray,
        salt: Salt = (),
        keys: list[bytes] | None = None,
    ) -> tuple[PageRun | None, np.ndarray]:
        """Insert full pages below `run` and move the caller's lock from it to the end of the longer path.

        Args:
            run: the end of a path that the caller has locked; None: the root, no lock.
            token_ids: [n * page_size], the tokens of the new pages, whose KV is written.
            pages: [n] int32, owned by the caller.
            keys: of these pages, as use_keys makes them; None: they are made when somebody asks.

        Returns:
            The new end of the locked path, and the pages ([≤ n] int32) that stay the caller's, because another page
            with the same prefix is in the tree already. All others belong to the cache now.
        """
        at = run if run is not None else self._roots.get(salt)
        if at is None:
            at = self._roots[salt] = PageRun.root(salt)
        rest, num_present = _as_array(token_ids), 0
        while (child := at.children.get(self._key_of(rest))) is not None:
            at = self._start_of(child, rest)
            self._lock_run(at)
            rest = rest[at.token_ids.size :]
            num_present += at.pages.size
        if rest.size:
            # Copies: the callers go on writing theirs, or would keep all of a prompt for its last pages.
            added = PageRun(at, self._key_of(rest), rest.copy(), pages[num_present:].copy())
            added.locks, added.keys = 1, None if keys is None else keys[num_present:]
            at.children[added.key] = added
            self._num_pages += added.pages.size
            at = added
            if self.watchers and self._is_found(added):
                for watcher in self.watchers:
                    watcher.stored(added)
        return (at if at.parent is not None else None), pages[:num_present].copy()

    def evict(self, count: int) -> np.ndarray:
        """Drop up to `count` unlocked pages, least recently used first; they, [≤ count] int32, are the caller's now."""
        evicted = [_NO_PAGES]
        while count > 0 and (run := self._unlocked.first) is not None:
            num_kept = max(0, run.pages.size - count)
            dropped = run.pages[num_kept:]
            self.sessions.give_up(run, dropped.size)
            self._drop_end(run, num_kept)
            evicted.append(dropped[::-1])
            count -= dropped.size
        return np.concatenate(evicted)

    def unlocked_runs(self) -> list[PageRun]:
        """The runs that can be found and that nobody has locked, in the order in which they would be given up."""
        return [run for run in self._unlocked if self._is_found(run)]

    def flush(self) -> np.ndarray:
        """Forget every prefix; returns the unused pages. Locked ones come back by eviction once unlocked."""
        self._roots = {}
        for watcher in self.watchers:
            watcher.cleared()
        return self.evict(self._num_unlocked)

    def forget(self, token_ids: Sequence[int] | np.ndarray, salt: Salt = ()) -> np.ndarray:
        """Drop every request's prefix that begins with the first page of `token_ids`.

        Its locked pages come back by eviction once unlocked, as after a flush. Returns the others ([n] int32), which
        are the cache's still: to be evicted as before, but no longer found.
        """
        root = self._roots.get(salt)
        key = self._key_of(_as_array(token_ids))
        if root is None or key not in root.children:
            return _NO_PAGES
        top = root.children.pop(key)
        if not root.children:
            del self._roots[salt]
        for watcher in self.watchers:
            watcher.forgotten(top)
        top.parent = PageRun.root(salt)
        top.parent.children[key] = top
        unlocked, runs = [_NO_PAGES], [top]
        while runs:
            run = runs.pop()
            runs += run.children.values()
            if not run.locks:
                unlocked.append(run.pages)
        return np.concatenate(unlocked)

    @staticmethod
    def path_of(run: PageRun | None) -> Iterator[PageRun]:
        """The runs of the path that ends with `run`, the last one first."""
        while run is not None and run.parent is not None:
            yield run
            run = run.parent

    def _move(self, run: PageRun) -> None:
        if not run.locks and run.parent is not None:
            self._unlocked.moved(run)

    def _lock_run(self, run: PageRun) -> None:
        if run.locks == 0:
            remove(run)
            self._num_unlocked -= run.pages.size
        run.locks += 1

    def _start_of(self, run: PageRun, token_ids: np.ndarray) -> PageRun:
        """The run's pages that these tokens begin with, at least its first: the whole run, or the first of the two runs
        that it becomes."""
        count = min(run.token_ids.size, token_ids.size)
        # Of short runs in half of numpy's time, and of long ones no later.
        if count == run.token_ids.size and run.token_ids.tobytes() == token_ids[:count].tobytes():
            return run
        unlike = (run.token_ids[:count] != token_ids[:count]).nonzero()[0]
        num_pages = (int(unlike[0]) if unlike.size else count) // self.page_size
        return run if num_pages == run.pages.size else self._divide(run, num_pages)

    def _divide(self, run: PageRun, num_pages: int) -> PageRun:
        """Make the run's first pages one of their own, which is returned; holders of the run still hold its end."""
        num_tokens = num_pages * self.page_size
        start = PageRun(run.parent, run.key, _part(run.token_ids, 0, num_tokens), _part(run.pages, 0, num_pages))
        start.locks = run.locks
        self.sessions.divided(run, start)
        run.parent, run.token_ids, run.pages = start, _part(run.token_ids, num_tokens), _part(run.pages, num_pages)
        if start.parent is not None:
            start.parent.children[start.key] = start
        if run.keys is not None:
            start.keys, run.keys = run.keys[:num_pages], run.keys[num_pages:]
        run.key = self._key_of(run.token_ids)
        start.children[run.key] = run
        if not run.locks:
            insert_behind(run, start)
        return start

    def _drop_end(self, run: PageRun, num_kept: int) -> None:
        """Drop an unlocked leaf's pages except the first `num_kept`."""
        parent = run.parent
        if parent is None or run.children:
            raise RuntimeError(f"internal error: the prefix cache evicts page {run.pages[-1]}, which others go on from")
        if self.watchers and self._is_found(run):
            for watcher in self.watchers:
                watcher.removed(run, num_kept)
        self.states.drop(run)
        num_dropped = run.pages.size - num_kept
        self._num_pages -= num_dropped
        self._num_unlocked -= num_dropped
        if num_kept:
            run.token_ids = _part(run.token_ids, 0, num_kept * self.page_size)
            run.pages = _part(run.pages, 0, num_kept)
            if run.keys is not None:
                del run.keys[num_kept:]
            return
        remove(run)
        self.sessions.dropped(run)
        del parent.children[run.key]
        # An emptied root goes too, or a salt per request would leak; after a flush it is not the salt's root any more.
        salt: Any = parent.key  # of a root
        if parent.parent is None and not parent.children and self._roots.get(salt) is parent:
            del self._roots[salt]

    def _is_found(self, run: PageRun) -> bool:
        """False of a run that was forgotten or cleared while it was locked."""
        at = run
        while at.parent is not None:
            at = at.parent
        salt: Any = at.key  # of a root
        return self._roots.get(salt) is at

    def _key_of(self, token_ids: np.ndarray) -> bytes:
        """The key of a run that begins with these tokens [n] int64; no run's if they do not fill a page."""
        return token_ids[: self.page_size].tobytes()


def _as_array(token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.asarray(token_ids, dtype=np.int64)  # keys of images have 63 bits


def _part(array: np.ndarray, start: int, end: int | None = None) -> np.ndarray:
    """A part of a run's array: a copy where less than half of the memory behind it would be of use."""
    part = array[start:end]
    whole = array if array.base is None else array.base
    return part if 2 * part.size >= whole.size else part.copy()
