"""Sounds and WAV files for tests."""

from __future__ import annotations

import io
import wave

import numpy as np

RATE = 16000


def tone(seconds: float, hertz: float = 440.0, rate: int = RATE) -> np.ndarray:
    times = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(0).standard_normal(times.size) * 0.1
    return (np.sin(2 * np.pi * hertz * times) * np.minimum(1, times * 4) + noise).astype(np.float32)


def wav_of(samples: np.ndarray, width: int = 2, rate: int = RATE, channels: int = 1) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(width)
        out.setframerate(rate)
        whole = np.clip(np.round(samples * 2 ** (8 * width - 1)), -(2 ** (8 * width - 1)), 2 ** (8 * width - 1) - 1)
        out.writeframes(np.repeat(whole.astype({2: "<i2", 4: "<i4"}[width]), channels).tobytes())
    return file.getvalue()
