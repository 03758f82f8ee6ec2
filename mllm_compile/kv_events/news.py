"""News of a rank's prefix cache: noted by the engine's thread, named and told by another.

The engine's thread copies arrays, and hashes nothing: blocks.py does, in the server's front or in a thread.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from mllm_compile.runtime.schedule.pages.page_run import PageRun, Salt

NO_PAGE = 0  # the dummy page, which no prefix has


class Origin(msgspec.Struct, array_like=True, frozen=True):
    """Facts that the blocks of a tree have in common.

    Attributes:
        root: the key that their keys begin with.
        secret: of all keys.
        cache_salt: the requests' own.
        lora_name, lora_id: the adapter, and its version.
        epoch: how often weights were replaced since which older KV is found no more.
    """

    root: bytes
    secret: bytes
    cache_salt: str | None = None
    lora_name: str | None = None
    lora_id: int | None = None
    epoch: int = 0


class Stored(msgspec.Struct, tag=1, array_like=True):
    """Pages that are found behind a page from now on.

    Attributes:
        parent: the page before them; NO_PAGE: they begin a prompt.
        pages: [n] int32.
        token_ids: [n * page size] int64.
        origin: of those without a parent.
    """

    parent: int
    pages: bytes
    token_ids: bytes
    origin: Origin | None


class Removed(msgspec.Struct, tag=2, array_like=True):
    """Pages [n] int32 that are found no more."""

    pages: bytes


class Cleared(msgspec.Struct, tag=3, array_like=True):
    """No page is found any more."""


class Moved(msgspec.Struct, tag=4, array_like=True):
    """A tier behind the device has pages from now on, or has them no more.

    Attributes:
        medium: of the tier, as events name it.
        keys: of the pages, one behind another.
    """

    medium: str
    keys: bytes
    is_stored: bool


class Gone(msgspec.Struct, tag=5, array_like=True):
    """Nothing is held any more, in tiers neither."""


News = Stored | Removed | Cleared | Moved | Gone


class PageNews:
    """Watches the prefix cache of a rank, on the engine's thread; a CacheWatcher.

    Args:
        origin_of: reads a salt.
    """

    def __init__(self, origin_of: Callable[[Salt], Origin]) -> None:
        self._origin_of = origin_of
        self._news: list[News] = []

    def stored(self, run: PageRun) -> None:
        parent = run.parent
        assert parent is not None, "a root has no pages"
        if parent.parent is None:
            salt: Salt = parent.key  # type: ignore[assignment]  # of a root
            news = Stored(NO_PAGE, run.pages.tobytes(), run.token_ids.tobytes(), self._origin_of(salt))
        else:
            news = Stored(int(parent.pages[-1]), run.pages.tobytes(), run.token_ids.tobytes(), None)
        self._news.append(news)

    def removed(self, run: PageRun, num_kept: int) -> None:
        self._news.append(Removed(run.pages[num_kept:].tobytes()))

    def forgotten(self, run: PageRun) -> None:
        runs = [run]
        while runs:
            one = runs.pop()
            runs += one.children.values()
            self._news.append(Removed(one.pages.tobytes()))

    def cleared(self) -> None:
        self._news.append(Cleared())

    def moved(self, medium: str, key: bytes, is_stored: bool) -> None:
        """Notes that a tier has a page, or has it no more."""
        last = self._news[-1] if self._news else None
        if isinstance(last, Moved) and (last.medium, last.is_stored) == (medium, is_stored):
            last.keys += key
        else:
            self._news.append(Moved(medium, key, is_stored))

    def take(self) -> list[News]:
        """The news since the last call, in their order."""
        news, self._news = self._news, []
        return news
