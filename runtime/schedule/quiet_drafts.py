"""Drafts that no step checks: what a request then gets tells whether they were right.

A draft from text costs the host some microseconds, and no step. So whether drafts would be accepted is known without a
try, while steps are planned ahead as ever. Free of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.speculation.drafter import Draft
from mllm_compile.runtime.speculation.texts import TextDrafter

_AT_ONCE = 16  # drafts of one call: half a millisecond


@dataclass(frozen=True, slots=True, eq=False)
class _Guess:
    num_before: int  # tokens of its output
    draft: Draft


class QuietDrafts:
    """See the module's header.

    Args:
        most: tokens of a draft.
    """

    def __init__(self, drafter: TextDrafter, most: int) -> None:
        self._drafter, self._most = drafter, most
        self._guesses: dict[Request, _Guess] = {}
        self._next = 0  # the request that is drafted for first in the next call

    def look(self, requests: Sequence[Request]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Drafts for some of these running requests, and says what became of the drafts of earlier calls.

        Returns:
            Rows, tokens that were drafted there and could be told, and how many of them were right: each [n] int64.
        """
        told = []
        for request in requests:
            guess = self._guesses.pop(request, None)
            if guess is not None:
                came = request.output_token_ids[guess.num_before :][: len(guess.draft)]
                agrees = [one == other for one, other in zip(guess.draft, came, strict=False)]
                told.append((request.row, len(came), [*agrees, False].index(False)))
        for _ in range(min(_AT_ONCE, len(requests))):
            self._next = (self._next + 1) % len(requests)
            request = requests[self._next]
            draft = self._drafter.guess(request, self._most)
            self._guesses[request] = _Guess(len(request.output_token_ids), draft)
        rows, drafted, right = np.array(told, dtype=np.int64).reshape(-1, 3).T
        return rows, drafted, right

    def end(self, request: Request) -> None:
        """Forgets a request that is over."""
        self._guesses.pop(request, None)
