"""The interface of drafters. A drafter guesses the next tokens of an answer; schedule/drafts.py asks it, and a step of
the model checks the guess. A bad guess costs time, and never changes a token. Free of torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol


class RequestDrafter(Protocol):
    """The guesses for one request."""

    def take(self, token_ids: Sequence[int]) -> None:
        """Takes the tokens that the request got since the last call."""

    def propose(self, most: int) -> Sequence[int]:
        """At most `most` ≥ 1 tokens that may follow; none where there is no guess."""

    def end(self) -> None:
        """Ends the request; nothing is asked afterwards."""


class Drafter(Protocol):
    """Makes a RequestDrafter for each request. Used by one thread."""

    def begin(self, prompt_token_ids: Sequence[int], salt: Hashable) -> RequestDrafter:
        """Begins with a request that has no output yet.

        Args:
            salt: requests of different salts must not learn from each other.
        """


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How the scheduler speculates.

    Attributes:
        drafter: guesses.
        num_tokens: most tokens of a draft.
        vocab_size: a draft ends before an id that is not below it.
        fills: every draft has as many tokens as it may have. A synthetic acceptance is measured so.
    """

    drafter: Drafter
    num_tokens: int
    vocab_size: int
    fills: bool = False
