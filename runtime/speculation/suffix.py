"""Suffix decoding: what followed most often where a text ended like this one, in it or in answers before.

After SuffixDecoding (Oliaro et al., NeurIPS 2025, arXiv 2411.04975), with a look-up of short n-grams in place of suffix
trees. The candidates are the newest places where the last KEY tokens stood. Those that agree with the text for longest
are followed token by token, by majority, round and round where a draft comes to the text's end. One that agrees alone,
as far as is looked, is gone on with until it is wrong: nothing else is searched meanwhile. Free of torch.

Shape legend: N tokens of a text, P places: how many tokens are up to each. A text may have END between its parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from mllm_compile.runtime.speculation.history import TokenHistory
from mllm_compile.runtime.speculation.past_answers import END, KEY, MOST_PLACES, PastAnswers, PastAnswersBySalt

LEAST = 2  # tokens that agree at a place in a request's own text, where KEY do nowhere
_OWN_TOKENS = 1 << 14  # of a request's own text that are searched: 10 µs
_FEW = 4  # places that are sooner compared one by one


class SuffixGuesser:
    """Drafts from a request's own text and from past answers of its salt.

    Args:
        max_tree_depth: most tokens that are compared.
        max_cached_requests: past answers that are kept of each salt; 0: none.
        max_spec_factor: drafted tokens for each token that agrees.
        min_token_prob: as `follow` takes least_share.
    """

    def __init__(
        self, max_tree_depth: int, max_cached_requests: int, max_spec_factor: float, min_token_prob: float
    ) -> None:
        self.depth, self.factor, self.least_share = max_tree_depth, max_spec_factor, min_token_prob
        self._past = PastAnswersBySalt(max_cached_requests) if max_cached_requests else None

    def begin(self, prompt_token_ids: Sequence[int], salt: Hashable) -> RequestSuffixes:
        return RequestSuffixes(self, prompt_token_ids, None if self._past is None else self._past.of(salt))


class RequestSuffixes:
    """The drafts of one request."""

    def __init__(self, guesser: SuffixGuesser, prompt_token_ids: Sequence[int], past: PastAnswers | None) -> None:
        self._guesser, self._past = guesser, past
        self._own = TokenHistory(prompt_token_ids, _OWN_TOKENS)
        self._answer: list[int] = []
        # The place that agrees alone, in the own text how far back, or in past answers; 0, -1: none does.
        self._back, self._kept = 0, -1

    def take(self, token_ids: Sequence[int]) -> None:
        self._own.append(token_ids)
        self._answer.extend(token_ids)
        if self._back:
            tokens, count = self._own.tokens, len(token_ids)
            there = tokens[max(0, tokens.size - self._back - count) : tokens.size - self._back].tolist()
            if there != list(token_ids):
                self._back = 0
        if self._past is not None and self._kept >= 0:
            is_right = self._past.ahead_of(self._kept, len(token_ids)) == list(token_ids)
            self._kept = self._kept + len(token_ids) if is_right else -1

    def propose(self, most: int) -> Sequence[int]:
        guesser, tokens = self._guesser, self._own.tokens
        limits = most, guesser.factor, guesser.least_share
        count = min(most, int(guesser.factor * guesser.depth))
        if self._back:
            ahead: list[int] = tokens[tokens.size - self._back :][:count].tolist()
            return (ahead * (1 + count // self._back))[:count]
        if self._past is not None and self._kept >= 0:
            if ahead := self._past.ahead_of(self._kept, count):
                return ahead
            self._kept = -1
        recent = tokens[-guesser.depth :]
        length, places = longest(tokens, own_ends(tokens), recent)
        self._back = tokens.size - int(places[0]) if length == guesser.depth and places.size == 1 else 0
        found = [(length, tokens, places)]
        if self._past is not None and length < guesser.depth:
            past = self._past.tokens
            past_length, places = longest(past, self._past.ends_of(recent[-KEY:].tolist()), recent)
            if past_length == guesser.depth and places.size == 1:
                self._kept = self._past.kept(int(places[0]))
            found.insert(past_length <= length, (past_length, past, places))
        drafts = (follow(text, places, length, *limits) for length, text, places in found)
        return next(filter(None, drafts), [])

    def end(self) -> None:
        if self._past is not None and self._answer:
            self._past.add(self._answer)


def own_ends(tokens: np.ndarray) -> np.ndarray:
    """The newest places [P] in a text [N], before its end, where its last KEY tokens stand, or at least LEAST."""
    if tokens.size <= KEY:
        return np.empty(0, dtype=np.int64)
    ends: np.ndarray = (tokens[KEY - 1 : -1] == tokens[-1]).nonzero()[0] + KEY
    for back in range(2, KEY + 1):
        agreeing = ends[tokens.take(ends - back) == tokens[-back]]
        if back > LEAST and not agreeing.size:
            break
        ends = agreeing
    return ends[-MOST_PLACES:]


def longest(tokens: np.ndarray, ends: Sequence[int] | np.ndarray, recent: np.ndarray) -> tuple[int, np.ndarray]:
    """(tokens that agree, places) of the places in a text [N] that agree longest; (0, none) without places.

    Args:
        ends: the places [P], oldest first.
        recent: [n] newest tokens.
    """
    places = np.asarray(ends, dtype=np.int64)
    if not places.size:
        return 0, places
    few = places.size <= _FEW
    lengths = (_agreements_of_few if few else _agreements)(tokens, places, recent)
    most = int(lengths.max())
    return most, places[lengths == most]


def follow(
    tokens: np.ndarray, places: np.ndarray, length: int, most: int, factor: float, least_share: float
) -> list[int]:
    """The draft of places [P] in a text [N] that agree so long; none without places.

    Args:
        most: most tokens of the draft; it also has at most `factor` for each token that agrees.
        least_share: the draft ends before a token that less of these places go on with.
    """
    if not places.size:
        return []
    count, parts = min(most, int(factor * length)), []
    for place in places.tolist():
        part = tokens[place : place + count].tolist()
        parts.append(part if len(part) == count else (part * (1 + count // len(part)))[:count])
    return _majority(parts, least_share)


def _agreements_of_few(tokens: np.ndarray, places: np.ndarray, recent: np.ndarray) -> np.ndarray:
    """How many of the newest tokens agree at each of a few places: [P]."""
    lengths = []
    for place in places.tolist():
        before = tokens[max(0, place - recent.size) : place]
        differs = (before != recent[recent.size - before.size :]).nonzero()[0]
        lengths.append(before.size - 1 - int(differs[-1]) if differs.size else before.size)
    return np.array(lengths)


def _agreements(tokens: np.ndarray, places: np.ndarray, recent: np.ndarray) -> np.ndarray:
    """How many of the newest tokens agree at each place: [P]."""
    before = places[:, None] - np.arange(1, recent.size + 1)
    differs = (tokens.take(before, mode="wrap") != recent[::-1]) | (before < 0)
    lengths: np.ndarray = np.where(differs.any(axis=1), differs.argmax(axis=1), recent.size)
    return lengths


def _majority(parts: list[list[int]], least_share: float) -> list[int]:
    """The draft that most of these continuations [P][K], oldest first, agree on token by token; END is no token."""
    least, draft = least_share * len(parts), list[int]()
    for index in range(len(parts[0])):
        nexts = [part[index] for part in parts]
        token = nexts[-1]
        if nexts.count(token) < len(nexts):
            votes = Counter(nexts)
            votes.pop(END, None)
            most = max(votes.values())
            if most < least:
                break
            # The newest place decides between equals.
            token = next(token for token in reversed(nexts) if votes[token] == most)
            parts = [part for part in parts if part[index] == token]
        elif token == END:
            break
        draft.append(token)
    return draft
