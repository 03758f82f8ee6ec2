"""Watchers of the prefix cache: tiers of memory behind it, and events for routers, hear of its pages.

Free of torch.
"""

from __future__ import annotations

from typing import Protocol

from mllm_compile.runtime.schedule.pages.page_run import PageRun


class CacheWatcher(Protocol):
    """Told on the engine's thread, in the midst of a change: it may read the cache, and never change it."""

    def stored(self, run: PageRun) -> None:
        """A run was inserted, where it can be found."""

    def removed(self, run: PageRun, num_kept: int) -> None:
        """A run is about to lose its pages behind the first `num_kept`. Those that were forgotten, or cleared, are not
        told again."""

    def forgotten(self, run: PageRun) -> None:
        """A run and all behind it are not found any more: their KV may be no numbers."""

    def cleared(self) -> None:
        """No run is found any more."""
