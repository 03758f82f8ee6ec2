"""Prompt lookup: what followed the newest tokens when they stood in the text before (PLD by A. Saxena, 2023).

Free of torch. N tokens of the text.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from mllm_compile.runtime.speculation.history import TokenHistory

_MOST_TOKENS = 1 << 15  # that are searched: 0.1 ms


class NgramGuesser:
    """Looks the newest `longest` tokens up, then fewer, down to `shortest`."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest

    def begin(self, prompt_token_ids: Sequence[int], salt: Hashable) -> RequestNgrams:
        return RequestNgrams(TokenHistory(prompt_token_ids, _MOST_TOKENS), self._shortest, self._longest)


class RequestNgrams:
    """The lookups of one request."""

    def __init__(self, history: TokenHistory, shortest: int, longest: int) -> None:
        self._history, self._shortest, self._longest = history, shortest, longest

    def take(self, token_ids: Sequence[int]) -> None:
        self._history.append(token_ids)

    def propose(self, most: int) -> Sequence[int]:
        tokens = self._history.tokens
        distance = distance_of_repeat(tokens, self._shortest, self._longest)
        return np.resize(tokens[-distance:], most).tolist() if distance else ()

    def end(self) -> None:
        """Nothing is kept."""


def distance_of_repeat(tokens: np.ndarray, shortest: int, longest: int) -> int:
    """How many tokens before the end the newest ones ended the last time; 0: they are new.

    Args:
        tokens: [N] integers.
        shortest, longest: how many of the newest tokens have to be there; more are preferred, then the latest place.
    """
    # Ends of earlier places, where the newest token stood: each further token leaves some of them.
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    found = 0
    for length in range(1, longest + 1):
        if length > 1:
            ends = ends[ends >= length - 1]
            ends = ends[tokens[ends - (length - 1)] == tokens[-length]]
        if not ends.size:
            break
        if length >= shortest:
            found = int(tokens.size - 1 - ends[-1])
    return found
