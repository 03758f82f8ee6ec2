"""Sounds of other kinds than WAV are decoded in a process that can be ended, and become samples as WAV files do."""

from __future__ import annotations

import io
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mllm_compile.errors import RequestError
from mllm_compile.media import samples
from mllm_compile.media.samples import SoundProcesses, read_samples
from mllm_compile.media.sound import MAX_BYTES, resampled
from tests.sounds import RATE, tone, wav_of

# A library whose files have a word, a rate, and bytes as samples.
LIBRARY = """
import numpy as np

class SoundFileError(RuntimeError):
    error_string = "Format not recognised."

class SoundFile:
    channels = 2
    def __init__(self, file):
        data = file.read()
        self.word, self.rest = data[:4], np.frombuffer(data[6:], np.int8).astype(np.float32) / 128
        self.samplerate = int.from_bytes(data[4:6], "big")
        if self.word not in (b"good", b"long", b"slow", b"much"):
            raise SoundFileError("Error opening <_io.BytesIO object>: Format not recognised.")
    def __enter__(self): return self
    def __exit__(self, *error): pass
    def read(self, count, dtype, always_2d):
        while self.word == b"slow": pass
        if self.word == b"much": raise MemoryError
        if self.word == b"long": return np.zeros((count, 2), dtype)
        part, self.rest = self.rest[:count], self.rest[count:]
        return np.stack([part, 0 * part], -1)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A soundfile of our own, which processes find too; those of other tests are not asked."""
    (tmp_path / "soundfile.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(samples, "_processes", lru_cache(maxsize=1)(SoundProcesses))


def file_of(word: bytes, values: np.ndarray, rate: int = 8000) -> bytes:
    return word + rate.to_bytes(2, "big") + values.astype(np.int8).tobytes()


def test_another_kind_of_file_is_one_channel_at_the_models_rate(library: None) -> None:
    values = np.arange(-100, 100)
    found = read_samples(file_of(b"good", values), 16000)
    expected = resampled(values.astype(np.float32) / 256, 8000, 16000)
    assert found.dtype == np.float32 and np.array_equal(found, expected)


def test_what_a_file_does_to_its_decoder_is_told_and_the_next_one_is_read(library: None) -> None:
    said = {
        b"none": r"cannot be read \(Format not recognised\.\)\. Convert it: ffmpeg",
        b"long": r"^the sound has 7,\d+ s; expected at most 7,200\. Cut it\.$",
        b"much": r"^decoding the sound needs more than 4 GiB of memory\. Convert it",
    }
    for word, message in said.items():
        with pytest.raises(RequestError, match=message):
            read_samples(file_of(word, np.arange(9)), 16000)
        assert read_samples(file_of(b"good", np.arange(9)), 8000).shape == (9,)
    with pytest.raises(RequestError, match=r"26,214,401 bytes; expected at most 26,214,400"):
        read_samples(b"good" + bytes(MAX_BYTES - 3), 16000)


def test_a_file_that_does_not_end_ends_its_process(library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MOST_SECONDS", 1)
    with pytest.raises(RequestError, match=r"^decoding the sound takes more than 1 s of processor time\. Convert it"):
        read_samples(file_of(b"slow", np.arange(9)), 16000)
    assert read_samples(file_of(b"good", np.arange(9)), 8000).shape == (9,)


def test_a_wav_file_needs_no_process(library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_processes", lambda: pytest.fail("a process is asked"))
    assert read_samples(wav_of(tone(0.1)), RATE).shape == (1600,)


def test_without_the_package_the_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match="it is FLAC"):
        read_samples(b"fLaC", RATE)


@pytest.mark.parametrize("kind", ["FLAC", "MP3", "OGG"])
def test_files_of_libsndfile_are_read(kind: str) -> None:
    soundfile: Any = pytest.importorskip("soundfile")
    sound, file = tone(0.5) / 2, io.BytesIO()
    soundfile.write(file, sound, RATE, format=kind)
    found = read_samples(file.getvalue(), RATE)
    size = min(found.size, sound.size)
    assert size > 0.9 * sound.size
    assert np.abs(found[:size] - sound[:size]).mean() < (1e-3 if kind == "FLAC" else 0.1)
