"""Checks what a caller gives as a sound, and brings it into one form: a file's bytes, or samples with their rate.

Nothing is decoded here: a worker does that (worker.py).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from mllm_compile.errors import RequestError
from mllm_compile.media.file_sources import SOUND_FILE, Source, SourceItem, bounded, named_source
from mllm_compile.media.limits import MAX_SOUND_SECONDS
from mllm_compile.media.sound import check_samples
from mllm_compile.runtime.short_repr import typed_repr

_SOUND = "samples [N] with their rate, as (samples, 16000), the bytes of a file, a data URL, or a local path"


def listed_sounds(given: Any) -> list[Any]:
    """One sound is bytes, a text, or a pair of samples and their rate; several are a list of these."""
    if given is None:
        return []
    is_pair = isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], int | float | np.number)
    return list(given) if isinstance(given, list | tuple) and not is_pair else [given]


def read_sound(given: Any, where: str, *, local_paths: bool) -> SourceItem:
    """
    Raises:
        RequestError: it is no sound, or exceeds a bound.
    """
    return SourceItem("audio", where, (_source(given, where, local_paths),))


def check_seconds(items: Sequence[SourceItem]) -> None:
    """
    Raises:
        RequestError: the sounds that need no decoding are too long together.
    """
    samples = ((len(frame.data) // 4, frame.rate) for item in items for frame in item.frames)
    seconds = sum(count / rate for count, rate in samples if rate is not None)
    if seconds > MAX_SOUND_SECONDS:
        raise RequestError(too_long(seconds))


def too_long(seconds: float) -> str:
    """The refusal of sounds that are so long together."""
    return (
        f"the prompt's sounds have {seconds:,.0f} s; expected at most {MAX_SOUND_SECONDS:,.0f} s. Cut them, or give "
        "fewer."
    )


def _source(given: Any, where: str, local_paths: bool) -> Source:
    if isinstance(given, bytes | bytearray | memoryview):
        return Source(bounded(bytes(given), where, SOUND_FILE))
    if isinstance(given, str | os.PathLike):
        return named_source(given, where, SOUND_FILE, local_paths)
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise RequestError(f"{where}: expected {_SOUND}, got {typed_repr(given)}.")
    samples, rate = given
    is_rate = isinstance(rate, int | float | np.number) and not isinstance(rate, bool) and math.isfinite(rate)
    if not is_rate or int(rate) != rate:
        raise RequestError(f"{where}: expected a whole number of samples a second, got {typed_repr(rate)}.")
    try:
        samples = check_samples(samples, int(rate))
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from None
    return Source(samples.tobytes(), rate=int(rate))
