"""Past answers, and where their n-grams stand: what a suffix drafter remembers of requests that are over.

All is bounded, by answers and by tokens (about 250 bytes each). Requests of different salts never see each other's. An
n-gram takes a microsecond to enter: of a long answer they are entered in parts, as drafts are asked for, so that no
step waits for all. Free of torch.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence

import numpy as np

KEY = 3  # tokens that are looked up
MOST_PLACES = 16  # of one n-gram; older ones are forgotten
MOST_TOKENS = 1 << 17  # of the answers of one salt; up to twice as many for a while
MOST_TOKENS_OF_ALL = 1 << 18

ENTERED_WITH_ANSWER, ENTERED_WITH_DRAFT = 256, 32  # tokens at once

END = -1  # of an answer; no token is negative


class PastAnswers:
    """The newest answers of one salt.

    Args:
        most: answers that are kept at least; the older half is forgotten once there are twice as many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._array = np.empty(0, dtype=np.int32)
        self._count = 0  # tokens in it
        self._num_forgotten = 0  # tokens that were before them
        self._ends: dict[tuple[int, ...], list[int]] = {}  # n-gram → ends, oldest first
        self._num_entered = 0  # tokens whose n-grams are in it
        self._lengths: deque[int] = deque(maxlen=most)  # of the newest answers, with their ends
        self._num_answers = 0

    @property
    def num_tokens(self) -> int:
        return self._count

    @property
    def tokens(self) -> np.ndarray:
        """[n] int32: the answers one after another, each with END behind it; a view, valid until the next `add`."""
        return self._array[: self._count]

    def add(self, answer: Sequence[int]) -> None:
        """Adds an answer."""
        answer = [*answer[:MOST_TOKENS], END]
        self._lengths.append(len(answer))
        self._num_answers += 1
        if self._num_answers > 2 * self._most or self._count + len(answer) > 2 * MOST_TOKENS:
            kept = self.tokens[-min(MOST_TOKENS, sum(self._lengths)) :].copy()
            self._num_forgotten += self._count - kept.size
            self._count, self._num_entered, self._ends, self._num_answers = 0, 0, {}, len(self._lengths)
            self._append(kept)
        self._append(answer)
        self._enter(ENTERED_WITH_ANSWER)

    def _append(self, tokens: Sequence[int] | np.ndarray) -> None:
        first, self._count = self._count, self._count + len(tokens)
        if self._count > self._array.size:
            grown = np.empty(2 * self._count, dtype=np.int32)
            grown[:first] = self._array[:first]
            self._array = grown
        self._array[first : self._count] = tokens

    def _enter(self, most: int) -> None:
        """Enters the n-grams of up to so many more tokens. One with the end of an answer in it is never looked up."""
        start, self._num_entered = max(self._num_entered + 1 - KEY, 0), min(self._num_entered + most, self._count)
        known = self._array[start : self._num_entered].tolist()
        for end, key in enumerate(zip(*(known[place:] for place in range(KEY)), strict=False), start + KEY):
            ends = self._ends.setdefault(key, [])
            ends.append(end)
            if len(ends) > MOST_PLACES:
                del ends[0]

    def kept(self, end: int) -> int:
        """A place in `tokens` in a number that stays when others are forgotten."""
        return self._num_forgotten + end

    def ahead_of(self, kept: int, most: int) -> list[int]:
        """At most so many tokens behind a place of `kept`, up to the end of its answer; none where it is forgotten."""
        place = kept - self._num_forgotten
        ahead: list[int] = self.tokens[place : place + most].tolist() if place >= 0 else []
        return ahead[: ahead.index(END)] if END in ahead else ahead

    def ends_of(self, recent: Sequence[int]) -> list[int]:
        """Where the last KEY of these tokens end in `tokens`: how many tokens are up to there, oldest first. Of a long
        answer the end is known after some calls."""
        if self._num_entered < self._count:
            self._enter(ENTERED_WITH_DRAFT)
        return self._ends.get(tuple(recent[-KEY:]), [])


class PastAnswersBySalt:
    """Past answers of each salt; those that nobody used for longest go when all have too many tokens.

    Args:
        most: answers of each salt, as PastAnswers takes it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._of_salts: OrderedDict[Hashable, PastAnswers] = OrderedDict()  # the last used is the last

    def of(self, salt: Hashable) -> PastAnswers:
        """The answers of a salt, which is used now."""
        found = self._of_salts.pop(salt, None) or PastAnswers(self._most)
        self._of_salts[salt] = found
        while len(self._of_salts) > 1 and self._num_tokens() > MOST_TOKENS_OF_ALL:
            self._of_salts.popitem(last=False)
        return found

    def _num_tokens(self) -> int:
        return sum(answers.num_tokens + 64 for answers in self._of_salts.values())  # an empty one counts too
