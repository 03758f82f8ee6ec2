"""Suffix decoding: what followed most often where a text ended like this one, in it or in answers before.

After SuffixDecoding (Oliaro et al., NeurIPS 2025, arXiv 2411.04975), with a look-up of short n-grams in place of suffix
trees. The candidates are the newest places where the last KEY tokens stood. Those that agree with the text for longest
are followed token by token, by majority. Free of torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from mllm_compile.runtime.speculation.history import TokenHistory
from mllm_compile.runtime.speculation.past_answers import KEY, MOST_PLACES, PastAnswers, PastAnswersBySalt, Place

_OWN_TOKENS = 1 << 14  # of a request's own text that are searched: 10 µs


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

    def take(self, token_ids: Sequence[int]) -> None:
        self._own.append(token_ids)
        self._answer.extend(token_ids)

    def propose(self, most: int) -> Sequence[int]:
        guesser, tokens = self._guesser, self._own.tokens
        recent = tokens[-guesser.depth :].tolist()
        limits = most, guesser.factor, guesser.least_share
        length, draft = follow(_own_places(tokens, len(recent), most), recent, *limits)
        if self._past is not None:
            past_length, past_draft = follow(self._past.places(recent, most), recent, *limits)
            if past_draft and (past_length > length or not draft):
                return past_draft
        return draft

    def end(self) -> None:
        if self._past is not None and self._answer:
            self._past.add(self._answer)


def _own_places(tokens: np.ndarray, depth: int, most: int) -> list[Place]:
    """The places of a text [N] int64 before its end where its last KEY tokens stood."""
    if tokens.size <= KEY:
        return []
    is_end = tokens[KEY - 1 : -1] == tokens[-1]
    for back in range(1, KEY):
        is_end &= tokens[KEY - 1 - back : -1 - back] == tokens[-1 - back]
    ends = (np.flatnonzero(is_end)[-MOST_PLACES:] + KEY).tolist()
    return [(tokens[max(0, end - depth) : end].tolist(), tokens[end : end + most].tolist()) for end in ends]


def follow(
    places: Sequence[Place], recent: Sequence[int], most: int, factor: float, least_share: float
) -> tuple[int, list[int]]:
    """(tokens that agree, draft) of the places that agree longest with `recent`; (0, []) without places.

    Args:
        places: oldest first.
        most: most tokens of the draft; it also has at most `factor` for each token that agrees.
        least_share: the draft ends before a token that less of these places go on with.
    """
    if not places:
        return 0, []
    lengths = [_agreement(before, recent) for before, _ in places]
    longest = max(lengths)
    left = [after for (_, after), length in zip(places, lengths, strict=True) if length == longest]
    total = len(left)
    draft: list[int] = []
    for step in range(min(most, int(factor * longest))):
        votes = Counter(after[step] for after in left if step < len(after))
        count = max(votes.values(), default=0)
        if not count or count < least_share * total:
            break
        # The newest place decides between equals.
        token = next(after[step] for after in reversed(left) if step < len(after) and votes[after[step]] == count)
        draft.append(token)
        left = [after for after in left if step < len(after) and after[step] == token]
    return longest, draft


def _agreement(before: Sequence[int], recent: Sequence[int]) -> int:
    length, most = KEY, min(len(before), len(recent))
    while length < most and before[-1 - length] == recent[-1 - length]:
        length += 1
    return length
