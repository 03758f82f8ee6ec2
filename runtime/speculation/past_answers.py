"""Past answers, and where their n-grams stand: what a suffix drafter remembers of requests that are over.

All is bounded, by answers and by tokens (about 250 bytes each). Requests of different salts never see each other's.
Free of torch.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence

KEY = 3  # tokens that are looked up
MOST_PLACES = 16  # of one n-gram; older ones are forgotten
MOST_TOKENS = 1 << 17  # of the answers of one salt; up to twice as many for a while
MOST_TOKENS_OF_ALL = 1 << 18

Place = tuple[list[int], list[int]]  # the tokens up to a place in a text, and those behind it

_END = -1  # of an answer; no token is negative


class PastAnswers:
    """The newest answers of one salt.

    Args:
        most: answers that are kept at least; the older half is forgotten once there are twice as many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # n-gram → ends, oldest first
        self._lengths: deque[int] = deque(maxlen=most)  # of the newest answers, with their ends
        self._num_answers = 0

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def add(self, answer: Sequence[int]) -> None:
        """Adds an answer."""
        answer = [*answer[:MOST_TOKENS], _END]
        self._lengths.append(len(answer))
        self._num_answers += 1
        if self._num_answers > 2 * self._most or len(self._tokens) + len(answer) > 2 * MOST_TOKENS:
            kept = self._tokens[-min(MOST_TOKENS, sum(self._lengths)) :]
            self._tokens, self._ends, self._num_answers = [], {}, len(self._lengths)
            self._enter(kept)
        self._enter(answer)

    def _enter(self, tokens: Sequence[int]) -> None:
        first = len(self._tokens)
        self._tokens.extend(tokens)
        for end in range(max(first + 1, KEY), len(self._tokens) + 1):
            # An n-gram with the end of an answer in it is never looked up.
            ends = self._ends.setdefault(tuple(self._tokens[end - KEY : end]), [])
            ends.append(end)
            if len(ends) > MOST_PLACES:
                del ends[0]

    def places(self, recent: Sequence[int], most: int) -> list[Place]:
        """Where the last KEY of `recent` stand, oldest first, with as many tokens before, and `most` behind."""
        tokens, depth = self._tokens, len(recent)
        ends = self._ends.get(tuple(recent[-KEY:]), ())
        return [(tokens[max(0, end - depth) : end], _answer_from(tokens, end, most)) for end in ends]


def _answer_from(tokens: Sequence[int], start: int, most: int) -> list[int]:
    """At most `most` tokens from `start` to the end of that answer."""
    found = list(tokens[start : start + most])
    return found[: found.index(_END)] if _END in found else found


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
