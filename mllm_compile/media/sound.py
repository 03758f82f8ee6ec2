"""Sounds that come from strangers: bytes of a file, or samples, become one channel at the model's rate.

WAV files are bounded by their header and size before anything is decoded; other files, which a worker alone decodes
(read_file), block by block.
"""

from __future__ import annotations

import io
import math
import wave
from importlib.util import find_spec
from typing import Any

import numpy as np

from mllm_compile.errors import RequestError
from mllm_compile.runtime.short_repr import typed_repr

MAX_BYTES = 25 * 2**20  # of a file, as OpenAI and vLLM have it
MAX_SECONDS = 2 * 3600.0
_RATES = (4000, 384000)
_MAX_CHANNELS = 16
_WIDTHS = (1, 2, 3, 4)  # bytes of a sample
# By the first bytes of a file: those that clients send most.
_OTHERS = {
    b"fLaC": "FLAC",
    **dict.fromkeys((b"ID3", b"\xff\xfb", b"\xff\xf3"), "MP3"),
    b"OggS": "Ogg",
    b"\x1aE\xdf\xa3": "WebM",
}
_HALF_TAPS = 32  # of the filter that resamples, on each side
_LOUDEST = 2.0**32  # of a sample, those of 32 bits left as whole numbers among them: louder ones overflow in float32
_BLOCK = 1 << 20  # samples that are decoded at once
_PHASES = 256  # whose weights are made at once


def read_wav(data: bytes) -> tuple[np.ndarray, int]:
    """(samples [N] float32 from -1 to 1, rate) of a WAV file of 8, 16, 24 or 32 bits.

    Raises:
        RequestError: it is no such file, broken, empty or too long.
    """
    if len(data) > MAX_BYTES:
        raise RequestError(f"the sound has {len(data):,} bytes; expected at most {MAX_BYTES:,}. Cut it.")
    other = next((kind for begin, kind in _OTHERS.items() if data.startswith(begin)), None)
    try:
        with wave.open(io.BytesIO(data)) as file:
            channels, width, rate, frames = file.getparams()[:4]
            if width not in _WIDTHS:
                raise wave.Error(f"samples of {8 * width} bits; expected 8, 16, 24 or 32")
            frames = min(frames, len(data) // (width * channels))  # who writes into a pipe cannot tell how many
            _check(channels, rate, frames)
            raw = file.readframes(frames)
    except RequestError:  # which is a ValueError
        raise
    except (wave.Error, EOFError, OSError, ValueError, RuntimeError) as error:  # the last where a chunk ends early
        why = f"it is {other}" if other else str(error) or "it ends too early"
        raise RequestError(
            f"the sound is no WAV file of whole numbers ({why}). Convert it: ffmpeg -i IN -ac 1 -ar 16000 -c:a "
            "pcm_s16le OUT.wav"
        ) from None
    raw = raw[: len(raw) // (width * channels) * width * channels]
    if not raw:
        raise RequestError("the sound has no samples. Send some.")
    return _numbers(raw, width).reshape(-1, channels).mean(axis=1, dtype=np.float32), rate


def read_file(data: bytes) -> tuple[np.ndarray, int]:
    """(samples [N] float32, rate) of a file that libsndfile reads, or without it of a WAV file of whole numbers.

    Raises:
        RequestError: it is no such file, broken, empty, has samples that are no numbers, or too many.
    """
    if find_spec("soundfile") is None:
        return read_wav(data)
    import soundfile

    if len(data) > MAX_BYTES:
        raise RequestError(f"the sound has {len(data):,} bytes; expected at most {MAX_BYTES:,}. Cut it.")
    found: list[np.ndarray] = []
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            rate = int(file.samplerate)
            _check(file.channels, rate, 0)
            while (block := file.read(_BLOCK, dtype="float32", always_2d=True)).size:  # a header may tell any number
                found.append(block.mean(axis=1, dtype=np.float32))
                _check(1, rate, sum(part.size for part in found))
    except RequestError:
        raise
    except (soundfile.SoundFileError, OSError, ValueError, RuntimeError, OverflowError) as error:
        told = getattr(error, "error_string", error)  # libsndfile's own words, without the name of our buffer
        why = " ".join(str(told).split())[:200]
        raise RequestError(
            f"the sound's file cannot be read ({why}). Convert it: ffmpeg -i IN -ac 1 -ar 16000 -c:a pcm_s16le OUT.wav"
        ) from None
    if not found:
        raise RequestError("the sound has no samples. Send some.")
    return check_samples(np.concatenate(found), rate), rate


def _numbers(raw: bytes, width: int) -> np.ndarray:
    if width == 1:
        return (np.frombuffer(raw, np.uint8).astype(np.float32) - 128) / 128
    if width == 3:
        parts = np.frombuffer(raw, np.uint8).reshape(-1, 3).astype(np.int32)
        whole = (parts[:, 0] << 8) | (parts[:, 1] << 16) | (parts[:, 2] << 24)
        return whole.astype(np.float32) / 2**31
    found: np.ndarray = np.frombuffer(raw, {2: "<i2", 4: "<i4"}[width]).astype(np.float32) / 2.0 ** (8 * width - 1)
    return found


def _check(channels: int, rate: int, frames: int) -> None:
    if not 1 <= channels <= _MAX_CHANNELS:
        raise RequestError(f"the sound has {channels} channels; expected 1 to {_MAX_CHANNELS}")
    if not _RATES[0] <= rate <= _RATES[1]:
        raise RequestError(f"the sound has {rate} samples a second; expected {_RATES[0]} to {_RATES[1]}")
    if frames / rate > MAX_SECONDS:
        raise RequestError(f"the sound has {frames / rate:,.0f} s; expected at most {MAX_SECONDS:,.0f}. Cut it.")


def check_samples(given: Any, rate: int) -> np.ndarray:
    """One channel [N] float32 of samples.

    Raises:
        RequestError: no sample is given, or too many, some that are no numbers or too loud, or a rate out of bounds.
    """
    try:
        samples = np.asarray(given, dtype=np.float32)
    except (TypeError, ValueError):
        expected = "a sound: expected samples, (samples, rate) or a WAV file"
        raise RequestError(f"{expected}, got {typed_repr(given)}") from None
    if samples.ndim == 2:  # channels are fewer than samples
        samples = samples.mean(axis=int(samples.shape[0] > samples.shape[1]))
    if samples.ndim != 1 or not samples.size:
        raise RequestError(f"a sound: expected samples [N], N at least 1, got shape {list(samples.shape)}")
    _check(1, rate, samples.size)
    if not max(samples.max(), -samples.min()) <= _LOUDEST:  # NaN is no less
        raise RequestError(
            f"a sound has samples that are no numbers (NaN or infinite), or beyond ±{_LOUDEST:,.0f}. Leave them out; a "
            "sound is from -1 to 1."
        )
    return np.ascontiguousarray(samples)


def resampled(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Samples [N] float32 at another rate, by a windowed sinc below both rates' highest tones.

    Polyphase: places of results repeat, relative to samples, after `wanted / gcd` of them. Results of one phase are the
    windows that begin so many samples apart, times the weights of that phase.
    """
    if rate == wanted:
        return samples
    count = max(1, samples.size * wanted // rate)
    common = math.gcd(rate, wanted)
    phases, step = wanted // common, rate // common
    cutoff = min(1.0, wanted / rate)
    half = math.ceil(_HALF_TAPS / cutoff)
    last = (count - 1) * rate // wanted + 2 * half + 1  # samples that the last result needs
    padded = np.pad(samples, (half, max(half, last - samples.size - half)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half)
    out = np.empty(count, dtype=np.float32)
    for start in range(0, min(phases, count), _PHASES):
        phase = np.arange(start, min(start + _PHASES, phases, count))
        places = phase * (rate / wanted)
        first = phase * rate // wanted + 1  # of the padded samples from half - 1 before each place on
        distance = (first - half - places)[:, None] + np.arange(2 * half)
        weights = cutoff * np.sinc(cutoff * distance) * np.cos(np.pi * distance / (2 * half + 2)) ** 2
        for index, begin, weight in zip(phase.tolist(), first.tolist(), weights.astype(np.float32), strict=True):
            results = out[index::phases]
            np.matmul(windows[begin::step][: results.size], weight, out=results)
    return out
