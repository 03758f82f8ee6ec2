"""Radix tree over full KV pages: which prefixes of tokens have their KV in which pages.

Owns the pages of its nodes until it evicts them. tables.py and ../rows.py know which pages a request holds privately,
and when KV counts as written. Free of torch. One node is one page, so edges never split; matching costs a dictionary
look-up a page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from mllm_compile.runtime.schedule.pages.state_snapshots import StateSnapshots

Salt = tuple[Hashable, ...]


class PageNode:
    """One cached page: its tokens follow those of its parent. A lock on it is a lock on the whole path to the root."""

    __slots__ = ("children", "key", "locks", "page", "parent")

    def __init__(self, parent: PageNode | None, key: Hashable, page: int) -> None:
        self.parent = parent  # None for a root
        self.key = key  # the page's token ids as bytes; the salt for a root
        self.page = page
        self.children: dict[Hashable, PageNode] = {}
        self.locks = 0


class RadixCache:
    """Prefixes by full pages, one tree for each salt, evicted by least recent use.

    Locks are counted along paths, so a locked node's ancestors are locked and every unlocked node's descendants are
    unlocked: all unlocked pages can be evicted. `_unlocked` is ordered by last use with children before their
    parents (unlocking walks from the leaf to the root), so its first entry is always a leaf and eviction is O(1).
    """

    def __init__(self, page_size: int, states: StateSnapshots | None = None) -> None:
        """Args: states: of nodes, for models whose layers carry one."""
        self.page_size = page_size
        self._key_bytes = page_size * np.dtype(np.int64).itemsize
        self.states = states or StateSnapshots()
        self._roots: dict[Salt, PageNode] = {}
        self._unlocked: OrderedDict[PageNode, None] = OrderedDict()
        self._num_pages = 0

    @property
    def num_pages(self) -> int:
        """Pages that the cache owns."""
        return self._num_pages

    @property
    def evictable_pages(self) -> int:
        """Cached pages without a request's lock on them."""
        return len(self._unlocked)

    def match_prefix(self, token_ids: np.ndarray, salt: Salt = ()) -> tuple[PageNode | None, np.ndarray]:
        """The longest cached prefix of `token_ids` [n] in full pages: its last node (None: no hit) and its pages.

        Takes no lock: lock the node before anything else may evict it.
        """
        node = self._roots.get(salt)
        if node is None:
            return None, np.empty(0, dtype=np.int32)
        # A first token waits for this: a long prefix has thousands of pages.
        data, width, path = self._bytes_of(token_ids), self._key_bytes, [node]
        for start in range(0, len(data) - width + 1, width):
            node = node.children.get(data[start : start + width])
            if node is None:
                break
            path.append(node)
        pages = np.fromiter([node.page for node in path[1:]], dtype=np.int32, count=len(path) - 1)
        return (path[-1] if pages.size else None), pages

    def match_state(self, token_ids: np.ndarray, salt: Salt = ()) -> tuple[PageNode | None, np.ndarray, int]:
        """The longest cached prefix that has a state: its last node (None: no hit), its pages, and the number of pages
        that are cached without regard to states."""
        node, pages = self.match_prefix(token_ids, salt)
        matched = depth = pages.size
        while depth and node is not None and node not in self.states:
            node, depth = node.parent, depth - 1
        return (node if depth else None), pages[:depth], matched

    def node_of(self, token_ids: np.ndarray, salt: Salt = ()) -> PageNode | None:
        """The node at whose end the tokens [n * page_size] end; None: they are not all cached."""
        node, pages = self.match_prefix(token_ids, salt)
        return node if pages.size * self.page_size == token_ids.size else None

    def lock(self, node: PageNode | None) -> None:
        """Keep the path to `node` from eviction until it is unlocked as often."""
        unlocked = self._unlocked
        while node is not None and (parent := node.parent) is not None:
            if node.locks == 0:
                del unlocked[node]
            node.locks += 1
            node = parent

    def unlock(self, node: PageNode | None) -> None:
        """Give one lock back; the path counts as used now."""
        while node is not None and node.parent is not None:
            if node.locks <= 0:
                raise RuntimeError(f"internal error: the prefix cache's page {node.page} was unlocked once too often")
            node.locks -= 1
            if node.locks == 0:
                self._unlocked[node] = None
            node = node.parent

    def has_next(self, node: PageNode | None, token_ids: Sequence[int] | np.ndarray, salt: Salt = ()) -> bool:
        """True if the first page of `token_ids` is in the tree right below `node` (None: the root)."""
        at = node if node is not None else self._roots.get(salt)
        return at is not None and self._page_keys(token_ids[: self.page_size])[0] in at.children

    def extend(
        self, node: PageNode | None, token_ids: Sequence[int] | np.ndarray, pages: np.ndarray, salt: Salt = ()
    ) -> tuple[PageNode | None, np.ndarray]:
        """Insert full pages below `node` and move the caller's lock from it to the end of the longer path.

        Args:
            node: the end of a path that the caller has locked; None: the root, no lock.
            token_ids: [n * page_size], the tokens of the new pages, whose KV is written.
            pages: [n] int32, owned by the caller.

        Returns:
            The new end of the locked path, and the pages ([≤ n] int32) that stay the caller's, because another page
            with the same prefix is in the tree already. All others belong to the cache now.
        """
        at = node if node is not None else self._roots.get(salt)
        if at is None:
            at = self._roots[salt] = PageNode(None, salt, 0)
        duplicates: list[int] = []
        for key, page in zip(self._page_keys(token_ids), pages.tolist(), strict=True):
            child = at.children.get(key)
            if child is None:
                child = at.children[key] = PageNode(at, key, page)
                self._num_pages += 1
                child.locks = 1
            else:
                duplicates.append(page)
                if child.locks == 0:
                    del self._unlocked[child]
                child.locks += 1
            at = child
        return (at if at.parent is not None else None), np.array(duplicates, dtype=np.int32)

    def evict(self, count: int) -> np.ndarray:
        """Drop up to `count` unlocked pages, least recently used first; they, [≤ count] int32, are the caller's now."""
        evicted = [self._unlocked.popitem(last=False)[0] for _ in range(min(count, len(self._unlocked)))]
        for node in evicted:
            self._detach(node)
        self._num_pages -= len(evicted)
        return np.array([node.page for node in evicted], dtype=np.int32)

    def flush(self) -> np.ndarray:
        """Forget every prefix; returns the unused pages. Locked ones come back by eviction once unlocked."""
        self._roots = {}
        return self.evict(len(self._unlocked))

    def forget(self, token_ids: Sequence[int] | np.ndarray, salt: Salt = ()) -> np.ndarray:
        """Drop every request's prefix that begins with the first page of `token_ids`.

        Its locked pages come back by eviction once unlocked, as after a flush. Returns the others ([n] int32), which
        are the cache's still: to be evicted as before, but no longer found.
        """
        root = self._roots.get(salt)
        keys = self._page_keys(token_ids[: self.page_size])
        if root is None or not keys or keys[0] not in root.children:
            return np.empty(0, dtype=np.int32)
        top = root.children.pop(keys[0])
        if not root.children:
            del self._roots[salt]
        top.parent = PageNode(None, salt, 0)
        top.parent.children[top.key] = top
        unlocked, nodes = [], [top]
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            if not node.locks:
                unlocked.append(node.page)
        return np.array(unlocked, dtype=np.int32)

    @staticmethod
    def path_of(node: PageNode | None) -> Iterator[PageNode]:
        """The nodes of the path that ends in `node`, the last one first."""
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def _detach(self, node: PageNode) -> None:
        parent = node.parent
        if parent is None or node.children:
            raise RuntimeError(f"internal error: the prefix cache evicts page {node.page}, which is not a leaf")
        del parent.children[node.key]
        self.states.drop(node)
        # An emptied root goes too, or a salt per request would leak; after a flush it is not the salt's root any more.
        salt: Any = parent.key  # of a root
        if parent.parent is None and not parent.children and self._roots.get(salt) is parent:
            del self._roots[salt]

    def _page_keys(self, token_ids: Sequence[int] | np.ndarray) -> list[bytes]:
        data, width = self._bytes_of(token_ids), self._key_bytes
        return [data[start : start + width] for start in range(0, len(data) - width + 1, width)]

    @staticmethod
    def _bytes_of(token_ids: Sequence[int] | np.ndarray) -> bytes:
        return np.asarray(token_ids, dtype=np.int64).tobytes()  # keys of images have 63 bits
