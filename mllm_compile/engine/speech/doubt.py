"""Answers that OpenAI's code does not believe: they repeat themselves, or are unlikely. Its thresholds."""

from __future__ import annotations

import numbers
import zlib
from collections.abc import Sequence

from mllm_compile.errors import RequestError
from mllm_compile.runtime.short_repr import typed_repr

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_MOST_RATIO = 2.4
_LEAST_LOGPROB = -1.0
_MOST_SILENT = 0.6  # probability of <|nospeech|>
_MOST_TEMPERATURES = 16


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
