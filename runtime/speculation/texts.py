"""Drafts from texts: what a request's tokens, and those of others, say of the next ones. Free of torch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mllm_compile.runtime.speculation.drafter import Asked, Draft, DraftedRequest


class RequestText(Protocol):
    """The guesses for one request."""

    def take(self, token_ids: Sequence[int]) -> None:
        """Takes the tokens that the request got since the last call."""

    def propose(self, most: int) -> Sequence[int]:
        """At most `most` ≥ 1 tokens that may follow; none where there is no guess."""

    def end(self) -> None:
        """Ends the request; nothing is asked afterwards."""


class TextGuesser(Protocol):
    """Makes a RequestText for each request."""

    def begin(self, prompt_token_ids: Sequence[int], salt: Hashable) -> RequestText:
        """Begins with a request that has no output yet.

        Args:
            salt: requests of different salts must not learn from each other.
        """


@dataclass(slots=True, eq=False)
class _Followed:
    text: RequestText
    num_taken: int = 0  # tokens of the output that the text has

    def take(self, request: DraftedRequest) -> None:
        new = request.output_token_ids[self.num_taken :]
        if new:
            self.text.take(new)
            self.num_taken += len(new)


class TextDrafter:
    """A Drafter that tells a guesser what requests get, and asks it request by request."""

    keeps_keys, keys_reach = False, 0

    def __init__(self, guesser: TextGuesser) -> None:
        self._guesser = guesser
        self._followed: dict[DraftedRequest, _Followed] = {}

    def propose(self, asked: Sequence[Asked]) -> list[Draft]:
        return [self.guess(one.request, one.most) for one in asked]

    def guess(self, request: DraftedRequest, most: int) -> Draft:
        """At most `most` ≥ 1 tokens that may follow what the request has; a step may be in flight."""
        followed = self._followed.get(request)
        if followed is None:
            text = self._guesser.begin(request.prompt_token_ids, request.cache_salt)
            followed = self._followed[request] = _Followed(text)
        followed.take(request)
        return followed.text.propose(most)

    def leave(self, request: DraftedRequest) -> None:
        """Texts are in no pages."""

    def end(self, request: DraftedRequest) -> None:
        followed = self._followed.pop(request, None)
        if followed is not None:
            followed.take(request)
            followed.text.end()
