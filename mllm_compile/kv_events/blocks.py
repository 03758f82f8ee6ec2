"""The blocks that routers know of: news of pages become events, with names that are the same in every tier.

A block is a page. Its name is the first half of its key (runtime/schedule/pages/page_keys.py), and says nothing to
readers: they hash the tokens that come with it. Blocks with an image's tokens have other numbers than ids, and are not
told, nor is what follows them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mllm_compile.kv_events.news import NO_PAGE, Cleared, News, Origin, Removed, Stored
from mllm_compile.kv_events.wire import GPU, AllBlocksCleared, BlockRemoved, BlockStored, Event
from mllm_compile.runtime.schedule.pages.page_keys import PageKeys

_MOST_ID = 1 << 31


class _Block(NamedTuple):
    key: bytes
    origin: Origin


def name_of(key: bytes) -> int:
    """The 64 bits that stand for a key in events."""
    return int.from_bytes(key[:8], "big")


class Blocks:
    """The blocks of one rank on its device."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}  # by page
        self._epoch = 0

    def events_of(self, news: list[News]) -> list[Event]:
        """The events that say the same."""
        events: list[Event] = []
        for one in news:
            if isinstance(one, Stored):
                events += self._stored(one)
            elif isinstance(one, Removed):
                events += self._removed(np.frombuffer(one.pages, np.int32).tolist())
            elif isinstance(one, Cleared):
                events += self.clear()
        return events

    def clear(self) -> list[Event]:
        """Forgets all blocks."""
        had_any = bool(self._blocks)
        self._blocks.clear()
        return [AllBlocksCleared()] if had_any else []

    def _stored(self, news: Stored) -> list[Event]:
        before = None if news.parent == NO_PAGE else self._blocks.get(news.parent)
        origin = news.origin if before is None else before.origin
        if origin is None:  # behind what was not told, or is found no more
            return []
        events = self.clear() if origin.epoch > self._epoch else []  # older weights' blocks are found no more
        if origin.epoch < self._epoch:
            return []
        self._epoch = origin.epoch
        pages = np.frombuffer(news.pages, np.int32).tolist()
        token_ids = np.frombuffer(news.token_ids, np.int64)
        page_size = token_ids.size // len(pages)
        others = np.flatnonzero(token_ids >= _MOST_ID)
        count = int(others[0]) // page_size if others.size else len(pages)
        if not count:
            return events
        told = token_ids[: count * page_size]
        keys = PageKeys(origin.secret, page_size).chain(origin.root if before is None else before.key, told)
        for page, key in zip(pages, keys, strict=False):
            self._blocks[page] = _Block(key, origin)
        stored = BlockStored(
            block_hashes=[name_of(key) for key in keys],
            parent_block_hash=None if before is None else name_of(before.key),
            token_ids=told.tolist(),
            block_size=page_size,
            lora_id=origin.lora_id,
            medium=GPU,
            lora_name=origin.lora_name,
            extra_keys=_extra_keys(origin, count, is_first=before is None),
            cache_salt=origin.cache_salt,
        )
        return [*events, stored]

    def _removed(self, pages: list[int]) -> list[Event]:
        gone = [block for page in pages if (block := self._blocks.pop(page, None)) is not None]
        return [BlockRemoved(block_hashes=[name_of(block.key) for block in gone], medium=GPU)] if gone else []


def _extra_keys(origin: Origin, count: int, is_first: bool) -> list[tuple[str, ...] | None] | None:
    """Returns vLLM's list: the adapter's name for each block, the salt for a prompt's first."""
    each = () if origin.lora_name is None else (origin.lora_name,)
    first = each if origin.cache_salt is None or not is_first else (*each, origin.cache_salt)
    if not (each or first):
        return None
    return [first or None, *([each or None] * (count - 1))]
