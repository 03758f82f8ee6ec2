"""A node of the prefix cache's tree: pages that were published together. prefix_cache.py changes it. Free of torch."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from mllm_compile.runtime.schedule.pages.eviction_order import Link

Salt = tuple[Hashable, ...]

_NO_TOKENS = np.empty(0, dtype=np.int64)
_NO_PAGES = np.empty(0, dtype=np.int32)
for _none in (_NO_TOKENS, _NO_PAGES):
    _none.setflags(write=False)


class PageRun(Link):
    """Cached pages, one behind another; their tokens follow the parent's. All of them have the same users.

    A lock on it is a lock on the whole path to the root. Its children are known by the tokens of their first pages.
    """

    __slots__ = ("children", "key", "keys", "locks", "pages", "parent", "token_ids")

    def __init__(self, parent: PageRun | None, key: Hashable, token_ids: np.ndarray, pages: np.ndarray) -> None:
        super().__init__()
        self.parent = parent  # None for a root
        self.key = key  # the first page's token ids as bytes; the salt for a root
        self.token_ids = token_ids  # [n * page_size] int64
        self.pages = pages  # [n] int32
        self.children: dict[Hashable, PageRun] = {}
        self.keys: list[bytes] | None = None  # of its pages, once PageKeys has made them
        self.locks = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of its pages."""
        return int(self.token_ids.size)

    def any_child(self) -> PageRun | None:
        """A run that goes on from this one, or None."""
        return next(iter(self.children.values()), None)

    @classmethod
    def root(cls, salt: Salt) -> PageRun:
        """The root of a tree, which has no pages."""
        return cls(None, salt, _NO_TOKENS, _NO_PAGES)
