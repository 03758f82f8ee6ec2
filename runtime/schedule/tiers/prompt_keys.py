"""Keys of the pages of prompts that wait. Each prompt is hashed once, however often it is looked at: 40,000 tokens take
milliseconds, in which no step is planned. Free of torch.
"""

from __future__ import annotations

import numpy as np

from mllm_compile.runtime.schedule.pages.page_run import PageRun, Salt
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.tiers.shelves import Shelves


class PromptKeys:
    """Used by the engine's thread alone."""

    def __init__(self, shelves: Shelves) -> None:
        self._shelves = shelves
        self._kept: dict[Request, tuple[Salt, int, list[bytes]]] = {}  # with tokens, and the keys of all full pages

    def first(
        self, request: Request, token_ids: np.ndarray, salt: Salt, run: PageRun | None, num_pages: int
    ) -> list[bytes]:
        """Keys of the first pages of a prompt: of those that end with `run`, and of the next one if it is full."""
        kept = self._of(request, token_ids, salt)
        if kept is not None:
            return kept[: num_pages + 1]
        known, size = self._shelves.path_keys(run), self._shelves.page_size
        return [*known, *self._behind(known, token_ids[: (num_pages + 1) * size], salt)]

    def all(self, request: Request, token_ids: np.ndarray, salt: Salt, known: list[bytes]) -> list[bytes]:
        """Keys of all full pages of a prompt.

        Args:
            known: of its first pages.
        """
        kept = self._of(request, token_ids, salt)
        if kept is None:
            kept = [*known, *self._behind(known, token_ids, salt)]
            self._kept[request] = (salt, token_ids.size, kept)
        return kept

    def leave(self, request: Request) -> None:
        """Forgets a request that waits no longer."""
        self._kept.pop(request, None)

    def _of(self, request: Request, token_ids: np.ndarray, salt: Salt) -> list[bytes] | None:
        of_salt, num_tokens, kept = self._kept.get(request, (None, -1, []))
        return kept if num_tokens == token_ids.size and of_salt == salt else None

    def _behind(self, known: list[bytes], token_ids: np.ndarray, salt: Salt) -> list[bytes]:
        keys = self._shelves.pages.cache.use_keys(self._shelves.secret)
        rest = token_ids[len(known) * self._shelves.page_size :]
        return keys.chain(known[-1] if known else keys.root(salt), rest)
