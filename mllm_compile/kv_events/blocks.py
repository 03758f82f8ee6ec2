"""The blocks that routers know of: news of pages become events, with names that are the same in every tier.

A block is a page. Its name is the first half of its key (runtime/schedule/pages/page_keys.py), and says nothing to
readers: they hash the tokens that come with it. Blocks with an image's tokens have other numbers than ids, and are not
told, nor is what follows them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mllm_compile.kv_events.news import NO_PAGE, Cleared, Moved, News, Origin, Removed, Stored
from mllm_compile.kv_events.wire import GPU, AllBlocksCleared, BlockRemoved, BlockStored, Event
from mllm_compile.runtime.schedule.pages.page_keys import KEY_BYTES, PageKeys

_MOST_ID = 1 << 31


class _Block(NamedTuple):
    key: bytes
    origin: Origin
    parent: bytes | None  # the key of the block before
    token_ids: np.ndarray  # [page size] int32


def name_of(key: bytes) -> int:
    """The 64 bits that stand for a key in events."""
    return int.from_bytes(key[:8], "big")


class Blocks:
    """The blocks of one rank, on its device and in the tiers behind it."""

    def __init__(self) -> None:
        self._on_device: dict[int, _Block] = {}  # by page
        self._in_tiers: dict[str, dict[bytes, _Block]] = {}  # by medium and key
        self._by_key: dict[bytes, _Block] = {}  # those on the device
        self._epoch = 0

    def events_of(self, news: list[News]) -> list[Event]:
        """The events that say the same."""
        events: list[Event] = []
        for one in news:
            if isinstance(one, Stored):
                events += self._stored(one)
            elif isinstance(one, Removed):
                events += self._removed(np.frombuffer(one.pages, np.int32).tolist())
            elif isinstance(one, Moved):
                events += self._moved(one)
            elif isinstance(one, Cleared) and any(self._in_tiers.values()):
                events += self._removed(list(self._on_device))
            else:
                events += self._forget()
        return events

    def _forget(self) -> list[Event]:
        """Forgets all blocks."""
        had_any = bool(self._on_device) or any(self._in_tiers.values())
        self._on_device.clear()
        self._by_key.clear()
        self._in_tiers.clear()
        return [AllBlocksCleared()] if had_any else []

    def _stored(self, news: Stored) -> list[Event]:
        before = None if news.parent == NO_PAGE else self._on_device.get(news.parent)
        origin = news.origin if before is None else before.origin
        if origin is None:  # behind what was not told, or is found no more
            return []
        events = self._forget() if origin.epoch > self._epoch else []  # older weights' blocks are found no more
        if origin.epoch < self._epoch:
            return []
        self._epoch = origin.epoch
        pages = np.frombuffer(news.pages, np.int32).tolist()
        token_ids = np.frombuffer(news.token_ids, np.int64)
        page_size = token_ids.size // len(pages)
        others = np.flatnonzero((token_ids < 0) | (token_ids >= _MOST_ID))
        count = int(others[0]) // page_size if others.size else len(pages)
        if not count:
            return events
        told = token_ids[: count * page_size]
        parent = None if before is None else before.key
        keys = PageKeys(origin.secret, page_size).chain(origin.root if parent is None else parent, told)
        blocks = [
            _Block(key, origin, previous, tokens)
            for key, previous, tokens in zip(
                keys, [parent, *keys], told.astype(np.int32).reshape(-1, page_size), strict=False
            )
        ]
        self._on_device.update(zip(pages, blocks, strict=False))
        self._by_key.update(zip(keys, blocks, strict=True))
        return [*events, _stored_event(blocks, GPU)]

    def _removed(self, pages: list[int]) -> list[Event]:
        gone = [block for page in pages if (block := self._on_device.pop(page, None)) is not None]
        for block in gone:
            self._by_key.pop(block.key, None)
        return _removed_events(gone, GPU)

    def _moved(self, news: Moved) -> list[Event]:
        keys = [news.keys[start : start + KEY_BYTES] for start in range(0, len(news.keys), KEY_BYTES)]
        tier = self._in_tiers.setdefault(news.medium, {})
        if not news.is_stored:
            return _removed_events([block for key in keys if (block := tier.pop(key, None)) is not None], news.medium)
        blocks = [block for key in keys if key not in tier and (block := self._known(key)) is not None]
        tier.update((block.key, block) for block in blocks)
        return [_stored_event(run, news.medium) for run in _runs_of(blocks)]

    def _known(self, key: bytes) -> _Block | None:
        """A block that is held somewhere."""
        holders = (self._by_key, *self._in_tiers.values())
        return next((found for blocks in holders if (found := blocks.get(key)) is not None), None)


def _runs_of(blocks: list[_Block]) -> list[list[_Block]]:
    """Blocks that follow each other, together."""
    runs: list[list[_Block]] = []
    for block in blocks:
        if runs and runs[-1][-1].key == block.parent:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def _stored_event(blocks: list[_Block], medium: str) -> BlockStored:
    first = blocks[0]
    return BlockStored(
        block_hashes=[name_of(block.key) for block in blocks],
        parent_block_hash=None if first.parent is None else name_of(first.parent),
        token_ids=np.concatenate([block.token_ids for block in blocks]).tolist(),
        block_size=int(first.token_ids.size),
        lora_id=first.origin.lora_id,
        medium=medium,
        lora_name=first.origin.lora_name,
        extra_keys=_extra_keys(first.origin, len(blocks), is_first=first.parent is None),
        cache_salt=first.origin.cache_salt,
    )


def _removed_events(blocks: list[_Block], medium: str) -> list[Event]:
    return [BlockRemoved(block_hashes=[name_of(block.key) for block in blocks], medium=medium)] if blocks else []


def _extra_keys(origin: Origin, count: int, is_first: bool) -> list[tuple[str, ...] | None] | None:
    """Returns vLLM's list: the adapter's name for each block, the salt for a prompt's first."""
    each = () if origin.lora_name is None else (origin.lora_name,)
    first = each if origin.cache_salt is None or not is_first else (*each, origin.cache_salt)
    if not (each or first):
        return None
    return [first or None, *([each or None] * (count - 1))]
