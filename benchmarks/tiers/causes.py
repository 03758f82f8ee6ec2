"""The cause for which each token of a prompt was computed and not found."""

from __future__ import annotations

from collections import Counter

import numpy as np

from benchmarks.tiers.simulated import PAGE, SECRET
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduler import Scheduler


class Causes:
    """Looks at requests as they are admitted.

    Attributes:
        tokens: of all prompts, by what has become of them.
    """

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self._asked: set[bytes] = set()  # keys of pages that some prompt had
        self._running: Counter[bytes] = Counter()

    def admitted(self, scheduler: Scheduler, request: Request, prompt: np.ndarray) -> None:
        """Counts a prompt [n] int64."""
        names, cached = self._names(scheduler, prompt), request.num_cached_tokens // PAGE
        self.tokens["found"] += cached * PAGE
        self.tokens["the last page, always computed"] += prompt.size - len(names) * PAGE
        for name in names[cached:]:
            self.tokens[self._cause(scheduler, name)] += PAGE
        self._asked.update(names)
        self._running.update(names)

    def over(self, scheduler: Scheduler, prompt: np.ndarray) -> None:
        """Notes that a request has ended."""
        self._running.subtract(self._names(scheduler, prompt))

    @staticmethod
    def _names(scheduler: Scheduler, prompt: np.ndarray) -> list[bytes]:
        keys = scheduler.pages.cache.use_keys(SECRET)
        return keys.chain(keys.root(()), prompt[: (prompt.size - 1) // PAGE * PAGE])

    def _cause(self, scheduler: Scheduler, name: bytes) -> str:
        tiers = scheduler.tiers
        if name not in self._asked:
            return "new"
        if tiers is not None:
            if name in tiers._shelves.host[False]:
                return "in the host's memory, not loaded"
            if name in tiers._stores._storing or (tiers._room is not None and name in tiers._room._leaving):
                return "on its way to the host's memory"
        return "of a prompt that is being computed" if self._running[name] > 0 else "given up"
