"""Answers that OpenAI's code does not believe: they repeat themselves, or are unlikely. Its thresholds.

Windows are asked in rounds, here decided and elsewhere answered: by an engine's call, or by requests of the server.
"""

from __future__ import annotations

import math
import numbers
import zlib
from collections.abc import Callable, Collection, Generator, Sequence
from typing import NamedTuple

from mllm_compile.errors import RequestError
from mllm_compile.runtime.short_repr import typed_repr

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_MOST_RATIO = 2.4
_LEAST_LOGPROB = -1.0
_MOST_SILENT = 0.6  # probability of <|nospeech|>
_MOST_TEMPERATURES = 16


class Written(NamedTuple):
    """A window's answer.

    Attributes:
        ids: its tokens without the end.
        logprob: the mean log-probability of all, or None.
        temperature: at which it was written down.
    """

    ids: list[int]
    logprob: float | None
    temperature: float = 0.0

    @classmethod
    def of(cls, ids: Sequence[int], ends: Collection[int], logprob: float | None) -> Written:
        """
        Args:
            ids: with the end, if there is one.
            ends: tokens that end an answer.
            logprob: of all of them together.
        """
        mean = logprob / len(ids) if ids and logprob is not None else None
        return cls(list(ids[:-1] if ids and ids[-1] in ends else ids), mean)


class Round(NamedTuple):
    """Windows that are asked beside each other.

    Attributes:
        places: of the windows.
        temperature: at which they are written down; None: they are asked how likely nobody speaks.
    """

    places: list[int]
    temperature: float | None


Rounds = Generator[Round, list[Written] | None, list[Written | None]]


def rounds_of(
    count: int, temperatures: Sequence[float], decode: Callable[[list[int]], str], knows_silence: bool
) -> Rounds:
    """Yields rounds and is sent their answers; returns the one that is believed of each window.

    That is the answer of the first temperature at which it is not doubted, or of the last; None of a window in which
    nobody speaks. A single temperature is believed.

    Args:
        count: of windows.
        knows_silence: the model can say how likely nobody speaks, by one token.
    """
    answers: list[Written | None] = [None] * count
    left = list(range(count))
    for number, temperature in enumerate(temperatures):
        if not left:
            break
        written = (yield Round(left, temperature)) or []
        told = {place: one._replace(temperature=temperature) for place, one in zip(left, written, strict=True)}
        for place, one in told.items():
            answers[place] = one
        if len(temperatures) == 1:
            break
        left = [place for place, one in told.items() if is_doubted(decode(one.ids), one.logprob)]
        unlikely = [place for place in left if is_unlikely(told[place].logprob)]
        if number == 0 and unlikely and knows_silence:
            said = (yield Round(unlikely, None)) or []
            for place, one in zip(unlikely, said, strict=True):
                if one.logprob is not None and is_silent(math.exp(one.logprob)):
                    answers[place] = None
                    left.remove(place)
    return answers


def next_of(rounds: Rounds, written: list[Written] | None) -> Round | list[Written | None]:
    """The next round, after the answers to the one before (None ahead of the first); or what is believed."""
    try:
        return rounds.send(written)
    except StopIteration as end:  # which no future of a thread can have
        believed: list[Written | None] = end.value
        return believed


def compression_ratio(text: str) -> float:
    """Bytes of a text to those that zlib makes of them: large where it repeats itself. 0 of none."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


def is_unlikely(mean_logprob: float | None) -> bool:
    """True if tokens of this mean log-probability are doubted."""
    return mean_logprob is not None and mean_logprob < _LEAST_LOGPROB


def is_doubted(text: str, mean_logprob: float | None) -> bool:
    """True if a window should be written down again, at a higher temperature."""
    return is_unlikely(mean_logprob) or compression_ratio(text) > _MOST_RATIO


def is_silent(no_speech: float) -> bool:
    """True if an unlikely answer is of a window in which nobody speaks, by the probability of <|nospeech|>."""
    return no_speech > _MOST_SILENT


def temperatures_of(given: float | Sequence[float]) -> tuple[float, ...]:
    """The temperatures that are tried, one after another.

    Raises:
        RequestError: they are no numbers, none or too many.
    """
    found = tuple(given) if isinstance(given, tuple | list) else (given,)
    is_wrong = any(isinstance(one, bool) or not isinstance(one, numbers.Real) for one in found)
    if is_wrong or not 0 < len(found) <= _MOST_TEMPERATURES:
        raise RequestError(
            f"temperature: expected a number, or 1 to {_MOST_TEMPERATURES} that are tried one after another, got "
            f"{typed_repr(given)}"
        )
    return found
