"""Whisper's rule of times: each text begins and ends with a token that is a time, and none runs backwards.

As Transformers' WhisperTimeStampLogitsProcessor. Its last rule, by probabilities, is the device's
(runtime/sampling/token_masks.py).

Shape legend: V vocabulary, W = ceil(V / 32) words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mllm_compile.runtime.sampling.grammar import MaskMaker, MaskWork
from mllm_compile.structured.form import Refused

_MOST_INITIAL = 50  # steps of 20 ms, as OpenAI's code and its models' files have it


@dataclass(slots=True)
class TimesMatcher:
    """The times of an answer so far.

    Attributes:
        of_last: whether the last two tokens are times.
        last_time: the last token that is one.
    """

    first_time: int
    count: int = 0
    of_last: tuple[bool, bool] = (True, False)
    last_time: int | None = None

    def take(self, token_ids: Sequence[int]) -> None:
        """Goes on by tokens of the answer."""
        for token in token_ids:
            is_time = token >= self.first_time
            self.of_last = (self.of_last[1] if self.count else True, is_time)
            self.last_time = token if is_time else self.last_time
            self.count += 1


@dataclass(eq=False)
class TimesGrammar:
    """Masks of one vocabulary; a grammar of any number of answers, and what makes their masks.

    Attributes:
        no_timestamps: the id of <|notimestamps|>; times are behind it.
        end: the first id that is no text.
        vocab_size: V.
    """

    no_timestamps: int
    end: int
    vocab_size: int
    masks: MaskMaker = field(init=False)
    first_time: int | None = field(init=False)

    def __post_init__(self) -> None:
        if not 0 < self.no_timestamps < self.vocab_size - 1:
            raise Refused(f"expected an id of <|notimestamps|> below {self.vocab_size - 1}, got {self.no_timestamps}")
        self.masks, self.first_time = self, self.no_timestamps + 1

    def matcher(self) -> TimesMatcher:
        """The state of a new answer."""
        return TimesMatcher(self.no_timestamps + 1)

    def fill(self, work: Sequence[MaskWork], masks: np.ndarray) -> Mapping[int, str]:
        """MaskMaker.fill; of drafts none is followed."""
        for part in work:
            part.matcher.take(part.token_ids)
            masks[part.rows] = 0
            masks[part.row] = self._bits(part.matcher)
        return {}

    def _bits(self, matcher: TimesMatcher) -> np.ndarray:
        """[W] int32."""
        words, first_time = -(-self.vocab_size // 32), matcher.first_time
        allowed = np.zeros(32 * words, dtype=bool)
        allowed[: self.vocab_size] = True
        allowed[self.no_timestamps] = False
        is_pair, is_time = matcher.of_last
        if matcher.count == 0:
            allowed[:first_time] = False
            allowed[first_time + _MOST_INITIAL + 1 :] = False
        elif is_time and is_pair:
            allowed[first_time:] = False
        elif is_time:
            allowed[: self.end] = False
        if matcher.last_time is not None:
            least = matcher.last_time + (not (is_time and not is_pair))
            allowed[first_time:least] = False
        return np.packbits(allowed, bitorder="little").view(np.int32)
