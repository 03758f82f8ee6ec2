"""WAV files of strangers: whatever their bytes are, they are samples or are refused by a message."""

from __future__ import annotations

import importlib.machinery
import random
import struct
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from mllm_compile.errors import RequestError
from mllm_compile.media.sound import read_file, read_wav

HEADER_BYTES = 44


def wav_of(bits: int, samples: int = 64) -> bytes:
    width = (bits + 7) // 8
    data = b"\1" * (width * samples)
    told = struct.pack("<IHHIIHH", 16, 1, 1, 16000, 16000 * width, width, bits)
    return (
        b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt " + told + b"data" + struct.pack("<I", len(data)) + data
    )


@pytest.mark.parametrize("bits", [8, 16, 24, 32])
def test_whole_numbers_of_up_to_32_bits_are_read(bits: int) -> None:
    samples, rate = read_wav(wav_of(bits))
    assert (samples.shape, rate) == ((64,), 16000)


@pytest.mark.parametrize("bits", [40, 64, 200])
def test_other_widths_are_refused(bits: int) -> None:
    with pytest.raises(RequestError, match=f"samples of {bits} bits; expected 8, 16, 24 or 32"):
        read_wav(wav_of(bits))


def test_changed_and_cut_files_are_read_or_refused() -> None:
    whole, refusals = wav_of(16), set()
    for seed in range(500):
        numbers = random.Random(seed)
        data = bytearray(whole[: numbers.randint(1, len(whole))])
        for _ in range(numbers.randint(0, 4)):
            data[numbers.randrange(min(HEADER_BYTES, len(data)))] = numbers.randrange(256)
        try:
            read_wav(bytes(data))
        except RequestError as error:
            refusals.add(str(error))
    assert len(refusals) > 3
    assert not any("()" in one for one in refusals)  # each says why


def test_a_bound_that_a_header_exceeds_is_told_as_it_is() -> None:
    data = bytearray(wav_of(16))
    data[24:28] = struct.pack("<I", 3)
    with pytest.raises(RequestError, match=r"^the sound has 3 samples a second; expected 4000 to 384000$"):
        read_wav(bytes(data))


def test_a_file_that_was_written_into_a_pipe_is_read() -> None:
    data = bytearray(wav_of(16))
    data[4:8] = data[40:44] = b"\xff" * 4  # as ffmpeg leaves them
    samples, _ = read_wav(bytes(data))
    assert np.array_equal(samples, read_wav(wav_of(16))[0])


class Library(ModuleType):
    """soundfile, whose files have samples without an end, unless they are broken."""

    class SoundFileError(RuntimeError):
        error_string = "Format not recognised."

    def __init__(self) -> None:
        super().__init__("soundfile")
        self.__spec__ = importlib.machinery.ModuleSpec("soundfile", None)

    class SoundFile:
        samplerate, channels = 4000, 2

        def __init__(self, file: Any) -> None:
            if file.read() == b"broken":
                raise Library.SoundFileError(f"Error opening {file!r}: Format not recognised.")

        def __enter__(self) -> Library.SoundFile:
            return self

        def __exit__(self, *error: object) -> None: ...

        def read(self, count: int, dtype: str, always_2d: bool) -> np.ndarray:
            return np.zeros((count, self.channels), dtype)


def test_other_files_are_bounded_as_they_are_decoded_and_refused_in_the_librarys_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", Library())
    with pytest.raises(RequestError, match=r"^the sound has 7,\d+ s; expected at most 7,200\. Cut it\.$"):
        read_file(b"endless")
    with pytest.raises(RequestError, match=r"cannot be read \(Format not recognised\.\)\. Convert it: ffmpeg"):
        read_file(b"broken")
