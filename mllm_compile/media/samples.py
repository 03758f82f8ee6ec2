"""Samples of what a caller gives as a sound: WAV files are read here, others in a process of their own.

That process runs sound_server.py, and needs the package soundfile.
"""

from __future__ import annotations

import math
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from mllm_compile.errors import RequestError
from mllm_compile.media.sound import MAX_BYTES, check_samples, read_wav, resampled
from mllm_compile.media.sound_protocol import (
    MOST_ANSWER,
    MOST_MEMORY,
    MOST_SECONDS,
    RATE,
    REFUSAL,
    SAMPLES,
    TOO_MUCH_MEMORY,
)
from mllm_compile.process.helper_process import HelperProcesses, NoAnswer
from mllm_compile.runtime.short_repr import typed_repr

_WAV = b"RIFF"
_MOST_PROCESSES = 2
_MAX_WAIT_S = 120
_MAX_START_S = 60
_ADVICE = "Convert it: ffmpeg -i IN -ac 1 -ar 16000 -c:a pcm_s16le OUT.wav"


def read_samples(given: Any, model_rate: int) -> np.ndarray:
    """Samples [N] float32 at the model's rate, of a file's bytes, an array, or (an array, its rate).

    Raises:
        RequestError: it is no sound, or has no samples, or NaN, or exceeds a limit.
        MllmError: no process can be started that decodes it.
    """
    rate = model_rate
    if isinstance(given, bytes | bytearray | memoryview):
        data = bytes(given)
        if not data.startswith(_WAV) and find_spec("soundfile") is not None:
            return _processes().decoded(data, model_rate)
        given, rate = read_wav(data)
    elif isinstance(given, tuple | list) and len(given) == 2 and not np.isscalar(given[0]):
        given, rate = given
    is_rate = isinstance(rate, int | float | np.number) and not isinstance(rate, bool) and math.isfinite(rate)
    if not is_rate or int(rate) != rate:
        raise RequestError(f"a sound's rate: expected a whole number of samples a second, got {typed_repr(rate)}")
    return resampled(check_samples(given, int(rate)), int(rate), model_rate)


class SoundProcesses(HelperProcesses):
    """Processes that decode sounds; from any thread, also after a fork."""

    def __init__(self) -> None:
        super().__init__(
            "mllm_compile.media.sound_server",
            b"",
            task="that decodes sounds",
            seconds=MOST_SECONDS,
            max_wait_s=_MAX_WAIT_S,
            max_start_s=_MAX_START_S,
            max_answer=MOST_ANSWER,
            most=_MOST_PROCESSES,
            kept_after=(SAMPLES, REFUSAL),
        )

    def decoded(self, data: bytes, rate: int) -> np.ndarray:
        """Samples [N] float32 at this rate of a file that libsndfile reads.

        Raises:
            RequestError: it is no such file, or exceeds a limit.
            MllmError: no process can be started.
        """
        if len(data) > MAX_BYTES:
            raise RequestError(f"the sound has {len(data):,} bytes; expected at most {MAX_BYTES:,}. Cut it.")
        try:
            kind, answer = self.ask(RATE.pack(rate) + data)
        except NoAnswer as none:
            raise RequestError(f"decoding the sound {none.why}. {_ADVICE}") from None
        if kind == TOO_MUCH_MEMORY:
            raise RequestError(f"decoding the sound needs more than {MOST_MEMORY >> 30} GiB of memory. {_ADVICE}")
        if kind == REFUSAL:
            raise RequestError(answer.decode("utf-8", "replace"))
        samples: np.ndarray = np.frombuffer(answer, np.float32)
        return samples


@lru_cache(maxsize=1)
def _processes() -> SoundProcesses:
    """The processes that all sounds share, which start with the first one that needs them."""
    return SoundProcesses()
