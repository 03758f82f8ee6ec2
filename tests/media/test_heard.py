"""Sounds on their way in: what each processor makes of one is what its tower takes, and what cannot be heard is refused
alone, in words that say what to do."""

from __future__ import annotations

import base64
import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mllm_compile.errors import RequestError
from mllm_compile.media import limits, sound_sources
from mllm_compile.media.messages import has_media, take_media
from mllm_compile.media.preprocessor import MediaPreprocessor
from mllm_compile.media.sources import read_items
from mllm_compile.runtime.media.request import RequestMedia
from tests.media.heard_cases import CASES, SOUND, SOUND_ID, make_folder
from tests.sounds import tone, wav_of


def preprocessor_of(folder: Path, name: str) -> MediaPreprocessor:
    return MediaPreprocessor("tiny", make_folder(folder, name), 2048, None)


@pytest.fixture(scope="module")
def asr(tmp_path_factory: pytest.TempPathFactory) -> MediaPreprocessor:
    return preprocessor_of(tmp_path_factory.mktemp("asr"), "qwen3_asr")


def items_of(*sounds: Any) -> Any:
    return read_items({"audio": list(sounds)}, local_paths=False)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "qwen3_asr" else pytest.mark.slow) for name in CASES]
)
def test_a_processor_makes_what_its_tower_takes(name: str, asr: MediaPreprocessor, tmp_path: Path) -> None:
    media, case = asr if name == "qwen3_asr" else preprocessor_of(tmp_path, name), CASES[name]
    short, long = (tone(2.0), 16000), (tone(31.5), 16000)
    if not case.features[1]:
        with pytest.raises(RequestError, match=r"sound 0: the sound has 31\.5 s, and the model hears 30\.0 s of it"):
            media.prepare(f"a{SOUND}", items_of(long), False)
    sounds = [short, long] if case.features[1] else [short, short]
    features = case.features if case.features[1] else case.features[:1] * 2
    made = media.prepare(f"a{SOUND}b{SOUND}c", items_of(*sounds), False)
    assert [int(made.is_feature[item.start : item.end].sum()) for item in made.items] == list(features)
    items = [(item.start, item.length, item.digest, item.tensors) for item in made.items]
    request = RequestMedia.of(case.tower, made.prompt_token_ids, made.is_feature, items)
    assert sum(case.tower.num_features(part.grid) for part in request.images) == sum(features)
    assert media.prepare([7, SOUND_ID, 8], items_of(short), False).items[0].digest == made.items[0].digest


def test_a_sound_is_the_same_in_any_form(asr: MediaPreprocessor, tmp_path: Path) -> None:
    samples = np.round(tone(1.5) * 2**14) / 2**15
    data = wav_of(samples)
    (tmp_path / "a.wav").write_bytes(data)
    coded = base64.b64encode(data).decode()
    url = f"data:audio/wav;base64,{coded}"
    forms = [data, (samples, 16000), url, str(tmp_path / "a.wav")]
    given = [read_items({"audio": form}, local_paths=True) for form in forms]
    parts: list[dict[str, Any]] = [
        {"type": "input_audio", "input_audio": {"data": coded, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "audio", "audio": data},
        {"type": "audio", "audio_url": url},
    ]
    for part in parts:
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]
        assert has_media(messages)
        left, items = take_media(messages, local_paths=False)
        assert left[0]["content"][0] == {"type": "audio"}
        given.append(items)
    digests = {asr.prepare(SOUND, items, False).items[0].digest for items in given}
    assert len(digests) == 1
    other = asr.prepare(SOUND, items_of(wav_of(samples[:-1])), False).items[0].digest
    assert other not in digests


def test_another_rate_is_resampled_in_the_worker(asr: MediaPreprocessor) -> None:
    one, other = (asr.prepare(SOUND, items_of((tone(2.0, rate=rate), rate)), False).items[0] for rate in (16000, 44100))
    assert one.length == other.length
    close = np.abs(one.tensors["input_features"] - other.tensors["input_features"])
    assert np.median(close) < 0.3, "noise differs, the tone is the same"


def header_of(channels: int, rate: int, frames: int) -> bytes:
    """A WAV file that tells so much, and has next to nothing."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((channels, 2, rate, 0, "NONE", ""))
        out.writeframes(b"\0" * 8)
    data = bytearray(file.getvalue())
    data[40:44] = min(frames * channels * 2, 2**32 - 1).to_bytes(4, "little")
    return bytes(data)


BAD: dict[str, tuple[Any, str]] = {
    "nothing": (b"", "sound 0: the sound is empty"),
    "no sound": (b"RIFF what is this", "sound 0: the sound is no WAV file"),
    "MP3": (b"ID3\x04" + b"\0" * 64, r"sound 0: the sound is no WAV file .*ffmpeg -i IN"),
    "no samples": (wav_of(np.zeros(0)), "sound 0: the sound has no samples"),
    "hours": ((np.zeros(7201 * 4000, np.float32), 4000), "the sound has 7,201 s; expected at most 7,200"),
    "channels": (header_of(200, 16000, 1), "expected 1 to 16"),
    "rate": (header_of(1, 3, 1), "expected 4000 to 384000"),
    "a gigabyte": (bytes(1 << 30), "has 1,073,741,824 bytes; expected at most 26,214,400"),
    "NaN": ((np.array([0.1, np.nan] * 800), 16000), r"sound 0: .*NaN or infinite"),
    "too loud": ((tone(1.0) * 1e20, 16000), r"sound 0: .*beyond ±4,294,967,296"),  # power of which is no float32
    "no numbers": ((["a"], 16000), "sound 0: a sound: expected samples"),
    "0 samples": ((np.zeros(0), 16000), "sound 0: a sound: expected samples .*shape"),
    "no rate": ((np.zeros(100), 0.5), "sound 0: expected a whole number of samples a second"),
    "array alone": (np.zeros(100), "sound 0: expected samples .* with their rate"),
    "path": ("/etc/passwd", "sound 0: expected a data URL"),
    "image": ("data:image/png;base64,AAAA", "expected data:audio/…;base64"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_sound_is_refused_alone(asr: MediaPreprocessor, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    given, words = BAD[what]
    with pytest.raises(RequestError, match=words):
        asr.prepare(SOUND, items_of(given), False)


def test_silence_is_heard_and_sounds_are_bounded_together(
    asr: MediaPreprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asr.prepare(SOUND, items_of((np.zeros(16000), 16000)), False).items[0].length == 13
    monkeypatch.setattr(sound_sources, "MAX_SOUND_SECONDS", 2.0)
    with pytest.raises(RequestError, match="the prompt's sounds have 3 s; expected at most 2 s"):
        items_of((tone(1.5), 16000), (tone(1.5), 16000))
    assert limits.MAX_SOUND_SECONDS == 3600
    with pytest.raises(RequestError, match="places for sounds"):
        asr.prepare("no place", items_of((tone(1.0), 16000)), False)


def test_parts_without_a_sound_and_models_that_hear_none(tmp_path: Path) -> None:
    parts = {
        "no sound; expected": [{"type": "input_audio"}, {"type": "input_audio", "input_audio": {"data": ""}}],
        "format: expected wav": [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "pcm16"}}],
        "is no base64": [{"type": "input_audio", "input_audio": {"data": "?", "format": "wav"}}],
        "no sound": [{"type": "audio_url"}, {"type": "audio"}],
    }
    for words, bad in parts.items():
        for part in bad:
            with pytest.raises(RequestError, match=words):
                take_media([{"role": "user", "content": [part]}], local_paths=False)
    files = make_folder(tmp_path, "qwen3_asr")
    files["config.json"] = json.dumps({"model_type": "llava", "image_token_id": 3}).encode()
    deaf = MediaPreprocessor("tiny", files, 256, None)
    with pytest.raises(RequestError, match=r"tiny takes no sounds: its config\.json names no token for them"):
        deaf.prepare(SOUND, items_of((tone(1.0), 16000)), False)
