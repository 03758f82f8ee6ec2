"""An engine's KV events: the prefix caches of its ranks are watched, and told once a step."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence

from mllm_compile.adapters.registry import Adapter
from mllm_compile.engine.cache_salt import read_salt
from mllm_compile.kv_events.news import News, Origin, PageNews
from mllm_compile.kv_events.wire import DISK, HOST
from mllm_compile.runtime.schedule.pages.page_keys import PageKeys
from mllm_compile.runtime.schedule.pages.page_run import Salt
from mllm_compile.runtime.schedule.pages.prefix_cache import RadixCache
from mllm_compile.runtime.schedule.tiers.tiers import Tiers

TellNews = Callable[[int, list[News]], None]  # of a rank

_MOST_ORIGINS = 1024  # that are kept
_MEDIA = {"host": HOST, "disk": DISK, "connector": DISK}


class PageEvents:
    """Watches from now on; for the engine's thread.

    Args:
        caches: by rank.
        tiers: behind the first of them; none, or one.
        adapters: gives those that are loaded.
        tell: takes the news of a step; it does not wait.
    """

    def __init__(
        self,
        caches: Sequence[RadixCache],
        tiers: Sequence[Tiers],
        adapters: Callable[[], Sequence[Adapter]],
        tell: TellNews,
    ) -> None:
        self._adapters = adapters
        self._tell = tell
        self._origins: OrderedDict[tuple[Salt, bytes], Origin] = OrderedDict()
        secret = secrets.token_bytes(32)
        self._ranks: list[PageNews] = []
        for cache in caches:
            keys = cache.use_keys(secret)
            news = PageNews(lambda salt, keys=keys: self._origin(salt, keys))  # type: ignore[misc]
            cache.watchers.append(news)
            self._ranks.append(news)
        for one in tiers:
            moved = self._ranks[0].moved
            one.watch(lambda name, key, is_stored, moved=moved: moved(_MEDIA[name], key, is_stored))  # type: ignore[misc]

    def flush(self) -> None:
        """Tells what has changed since the last call."""
        for rank, watched in enumerate(self._ranks):
            if news := watched.take():
                self._tell(rank, news)

    def _origin(self, salt: Salt, keys: PageKeys) -> Origin:
        root = keys.root(salt)
        if (known := self._origins.get((salt, root))) is not None:
            return known
        cache_salt, digest, epoch = read_salt(salt)
        adapter = next((one for one in self._adapters() if one.digest == digest), None) if digest else None
        name = adapter.name if adapter is not None else digest
        version = adapter.version if adapter is not None else None
        origin = self._origins[salt, root] = Origin(root, keys.secret, cache_salt, name, version, epoch)
        if len(self._origins) > _MOST_ORIGINS:
            self._origins.popitem(last=False)
        return origin
