"""Windows of sound equal those by Transformers' extractor; other rates sound the same."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from mllm_compile.media.log_mel import LogMel, read_log_mel
from mllm_compile.media.sound import resampled


@pytest.mark.parametrize(("bins", "seconds"), [(80, 30), (128, 30), (16, 1)])
def test_windows_are_those_of_transformers(bins: int, seconds: int) -> None:
    samples = np.random.default_rng(0).standard_normal(seconds * 16000 // 2).astype(np.float32) * 0.2
    samples[: samples.size // 3] *= 0.01
    extract = WhisperFeatureExtractor(feature_size=bins, chunk_length=seconds)
    theirs = extract(samples, sampling_rate=16000, return_tensors="np").input_features[0]
    ours = LogMel(bins, samples=seconds * 16000).window(samples)
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() < 1e-5


def test_a_long_sound_takes_little_more_memory_than_its_samples_and_its_frames() -> None:
    """The longest that is taken has 460 MB of samples."""
    samples = np.random.default_rng(0).standard_normal(300 * 16000).astype(np.float32)
    log_mel = LogMel(128)
    log_mel.window(samples[: log_mel.samples])  # makes its filters
    tracemalloc.start()
    try:
        frames = log_mel.whole(samples)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 1.1 * (samples.nbytes + frames.nbytes) + 2**25  # frames are computed some at once


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_a_tone_of_another_rate_is_the_same_tone(rate: int) -> None:
    def tone(rate: int) -> np.ndarray:
        return np.sin(2 * np.pi * 440 * np.arange(rate) / rate).astype(np.float32)

    ours = resampled(tone(rate), rate, 16000)
    assert ours.size == 16000
    assert np.abs(ours - tone(16000))[200:-200].max() < 2e-3


def test_tones_that_the_new_rate_has_not_are_left_out() -> None:
    high = np.sin(2 * np.pi * 11000 * np.arange(48000) / 48000).astype(np.float32)
    assert np.abs(resampled(high, 48000, 16000))[200:-200].max() < 1e-2


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (b"{", "no JSON"),
        ({"hop_length": 0}, "whole numbers from 1"),
        ({"feature_size": 128}, "128 × 3000; the encoder"),
    ],
)
def test_settings_that_do_not_fit_say_why(told: object, said: str) -> None:
    data = told if isinstance(told, bytes) else json.dumps(told).encode()
    found = read_log_mel({"preprocessor_config.json": data}, 80, 3000)
    assert isinstance(found, str)
    assert said in found
