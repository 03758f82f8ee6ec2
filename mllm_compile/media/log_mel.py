"""Log-mel windows of sound, as Whisper's encoders read them: Transformers' WhisperFeatureExtractor in numpy.

A test compares the two. A start from a runtime imports no Transformers, and an extractor there is one formula.

Shape legend: N samples, B mel bins, F frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mllm_compile.runtime.files.json_data import parse_json

_SETTINGS = "preprocessor_config.json"
_KEYS = {"feature_size": "bins", "sampling_rate": "rate", "n_fft": "fft", "hop_length": "hop", "n_samples": "samples"}
_MOST = 10_000_000
_FLOOR = 1e-10
_FRAMES_AT_ONCE = 250  # whose spectra stay in a core's cache: 30 s of sound take 6.5 ms of it, and 9.4 with 3000
_RANGE = 8.0  # decades below the loudest that are told apart
_LINEAR_HZ, _LINEAR_MELS = 1000.0, 15.0  # up to there Slaney's scale is linear
_LOG_STEP = 27.0 / np.log(6.4)


@dataclass(frozen=True)
class LogMel:
    """The settings of preprocessor_config.json.

    Attributes:
        bins: B.
        rate: samples of a second.
        fft: samples of a frame; hop: from one frame to the next.
        samples: of a window; shorter sounds end with silence.
    """

    bins: int
    rate: int = 16000
    fft: int = 400
    hop: int = 160
    samples: int = 480000

    @property
    def frames(self) -> int:
        """F of a window."""
        return self.samples // self.hop

    def window(self, samples: np.ndarray) -> np.ndarray:
        """[B, F] float32 of a sound [N ≤ samples] float32."""
        padded = np.zeros(self.samples, dtype=np.float32)
        padded[: samples.size] = samples
        return self.whole(padded)

    def whole(self, samples: np.ndarray) -> np.ndarray:
        """[B, N // hop] float32 of a sound [N > fft / 2] float32 of any length, in range of its own loudest part."""
        padded = np.pad(samples, self.fft // 2, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, self.fft)[:: self.hop][: samples.size // self.hop]
        hann, filters = np.hanning(self.fft + 1)[:-1], _filters(self.bins, self.fft, self.rate)
        mel = np.empty((self.bins, len(frames)), dtype=np.float32)
        for start in range(0, len(frames), _FRAMES_AT_ONCE):
            power = np.abs(np.fft.rfft(frames[start : start + _FRAMES_AT_ONCE] * hann, axis=1)) ** 2
            mel[:, start : start + _FRAMES_AT_ONCE] = np.log10(np.maximum(_FLOOR, power @ filters)).T
        np.maximum(mel, mel.max() - _RANGE, out=mel)  # in place: a long sound has hundreds of megabytes
        mel += 4.0
        mel /= 4.0
        return mel


def read_log_mel(files: Mapping[str, bytes], bins: int, frames: int) -> LogMel | str:
    """The settings of preprocessor_config.json, or else Whisper's; a text: why they are not served.

    Args:
        files: the processor's, by name.
        bins, frames: of the windows that the encoder reads.
    """
    try:
        told = parse_json(files.get(_SETTINGS, b"{}"))
        numbers = {ours: told.get(theirs, None) for theirs, ours in _KEYS.items()} if isinstance(told, dict) else {}
    except ValueError as error:
        return f"{_SETTINGS} is no JSON ({error})"
    given = {name: value for name, value in numbers.items() if value is not None}
    if not all(isinstance(value, int) and 0 < value <= _MOST for value in given.values()):
        return f"{_SETTINGS} has {given}; expected whole numbers from 1 to {_MOST:,}"
    found = LogMel(**{"bins": bins, **given})
    if (found.bins, found.frames) != (bins, frames):
        return f"{_SETTINGS} makes windows of {found.bins} × {found.frames}; the encoder reads {bins} × {frames}"
    return found


def _mels(hertz: np.ndarray | float) -> np.ndarray:
    """Slaney's mel scale."""
    hertz = np.asarray(hertz, dtype=np.float64)
    linear = hertz * _LINEAR_MELS / _LINEAR_HZ
    logarithmic = _LINEAR_MELS + np.log(np.maximum(hertz, _FLOOR) / _LINEAR_HZ) * _LOG_STEP
    return np.where(hertz >= _LINEAR_HZ, logarithmic, linear)


def _hertz(mels: np.ndarray) -> np.ndarray:
    linear = mels * _LINEAR_HZ / _LINEAR_MELS
    return np.where(mels >= _LINEAR_MELS, _LINEAR_HZ * np.exp((mels - _LINEAR_MELS) / _LOG_STEP), linear)


@lru_cache(maxsize=4)
def _filters(bins: int, fft: int, rate: int) -> np.ndarray:
    """[fft // 2 + 1, B]: triangles between neighbours of the scale, each of an area of 1."""
    highest = rate / 2
    points = _hertz(np.linspace(0.0, float(_mels(highest)), bins + 2))
    places = np.linspace(0.0, highest, fft // 2 + 1)[:, None]
    rising = (places - points[None, :-2]) / np.diff(points)[None, :-1]
    falling = (points[None, 2:] - places) / np.diff(points)[None, 1:]
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    filters: np.ndarray = triangles * (2.0 / (points[2:] - points[:-2]))[None, :]
    return filters
