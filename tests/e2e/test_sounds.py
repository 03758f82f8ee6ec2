"""Sounds through Whisper's encoder to its decoder's tokens, against Transformers' extractor and forward."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mllm_compile import Engine, SamplingParams
from mllm_compile.engine.speech.cuts import cut
from mllm_compile.errors import RequestError
from tests.e2e.test_encoder_decoders import config_of
from tests.model.encoder_decoders import greedy_of_sound, save_speech_tokenizer, save_whisper
from tests.sounds import RATE, tone, wav_of

SUPPRESSED = list(range(10, 40))  # what transcribe never writes
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whisper")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    model = save_whisper(folder / "model")
    save_speech_tokenizer(folder / "model")
    path = folder / "model/generation_config.json"
    told = json.loads(path.read_text(encoding="utf-8"))
    told |= {"suppress_tokens": SUPPRESSED, "begin_suppress_tokens": [3]}
    path.write_text(json.dumps(told), encoding="utf-8")
    return model


@pytest.fixture(scope="module")
def engine(folder: Path, model: Any) -> Iterator[Engine]:
    config = config_of(folder / "model", folder / "cache", runtime={"max_model_len": 64})
    with Engine(config) as engine:
        yield engine


def of_sound(sound: Any, **rest: Any) -> dict[str, Any]:
    return {"encoder_prompt": {"multi_modal_data": {"audio": sound}}, **rest}


def test_tokens_of_sounds_are_transformers(engine: Engine, model: Any) -> None:
    sounds = [tone(1.0), tone(0.3, 200), tone(0.7, 900), tone(0.01)]
    outputs = engine.generate([of_sound((one, RATE)) for one in sounds], GREEDY)
    assert [output.error for output in outputs] == [None] * 4
    assert [output.token_ids for output in outputs] == [greedy_of_sound(model, one, [3], 8) for one in sounds]
    beginning = {"prompt_token_ids": [3, 20, 21], "multi_modal_data": {"audio": (sounds[0], RATE)}}
    (output,) = engine.generate(beginning, GREEDY)
    assert output.token_ids == greedy_of_sound(model, sounds[0], [3, 20, 21], 8)


@pytest.mark.parametrize(("width", "channels"), [(2, 1), (4, 2)])
def test_a_wav_file_is_read_as_its_samples(engine: Engine, model: Any, width: int, channels: int) -> None:
    samples = np.round(tone(0.5) * 2**14) / 2**15
    (output,) = engine.generate(of_sound(wav_of(samples, width, channels=channels)), GREEDY)
    assert output.token_ids == greedy_of_sound(model, samples, [3], 8)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (of_sound((np.zeros(0), RATE)), "N at least 1"),
        (of_sound((np.array([0.0, np.nan]), RATE)), "no numbers"),
        (of_sound((tone(1.1), RATE)), "reads at most 1"),
        (of_sound((np.zeros(10), 0)), "0 samples a second"),
        (of_sound((np.zeros(10), "x")), "whole number of samples"),
        (of_sound((np.zeros((2, 2, 2)), RATE)), "got shape"),
        (of_sound("x"), "expected samples"),
        (of_sound((np.ones(9), RATE), cache_salt=[1]), "cache_salt is a text"),
        (of_sound((np.ones(9), RATE), prompt="w20"), "no use for 'prompt'"),
        (of_sound((np.ones(9), RATE), what=1), "no use for 'what'"),
        (
            {"encoder_prompt": {"multi_modal_data": {"audio": (np.ones(9), RATE)}, "prompt": "w20"}},
            "no use for 'prompt'",
        ),
        (of_sound(b"RIFF"), "no WAV file"),
        (of_sound(b"\0" * (26 * 2**20)), "expected at most 26,214,400"),
        (of_sound(wav_of(np.zeros(0))), "no samples"),
        ([3, 20], "the encoder reads sounds"),
        ("w20", "the encoder reads sounds"),
        ({"encoder_prompt": {"multi_modal_data": {"image": 1}}}, "the encoder reads sounds"),
    ],
)
def test_a_bad_sound_is_refused_and_hurts_no_other(engine: Engine, model: Any, prompt: Any, said: str) -> None:
    sound = tone(0.4)
    refused, served = engine.generate([prompt, of_sound((sound, RATE))], GREEDY)
    assert (refused.finish_reason, refused.token_ids) == ("error", [])
    assert said in (refused.error or "")
    assert served.token_ids == greedy_of_sound(model, sound, [3], 8)


def test_long_sounds_are_cut_and_their_windows_answered_together(engine: Engine, model: Any) -> None:
    sound = np.concatenate([tone(0.9, hertz) for hertz in (200, 400, 800)])
    sounds = [(sound, RATE), wav_of(tone(0.5, rate=8000), rate=8000)]
    first, second = engine.transcribe(sounds, temperature=0.0)
    windows = cut(sound, RATE, RATE)
    start = [100, 105]  # <|startoftranscript|><|notimestamps|>
    expected = [greedy_of_sound(model, part, start, 62, SUPPRESSED, [3]) for _, part in windows]
    assert expected != [greedy_of_sound(model, part, start, 62) for _, part in windows]
    ended = [ids[: ids.index(3)] if 3 in ids else ids for ids in expected]
    words = [one for segment in first.segments for one in segment.token_ids if one < 100]
    assert words == [one for ids in ended for one in ids if one < 100]  # others are times, and no text
    assert first.duration == pytest.approx(2.7)
    assert first.segments[0].start == 0
    assert all(one.start <= one.end <= 2.7 for one in first.segments)
    assert (second.duration, second.language) == (0.5, None)


def test_times_follow_the_rule_of_transformers(engine: Engine, model: Any) -> None:
    from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

    told = SimpleNamespace(no_timestamps_token_id=105, eos_token_id=3, max_initial_timestamp_index=50)
    rule = WhisperTimeStampLogitsProcessor(told, begin_index=1)
    sounds = [tone(0.8), tone(0.5, 900)]
    found = engine.transcribe([(one, RATE) for one in sounds], timestamps=True, temperature=0.0)
    for sound, transcript in zip(sounds, found, strict=True):
        ids = greedy_of_sound(model, sound, [100], 63, SUPPRESSED, rule=rule)
        ids = ids[: ids.index(3)] if 3 in ids else ids
        assert ids[0] > 105
        assert [one for each in transcript.segments for one in each.token_ids] == [one for one in ids if one <= 105]
    doubted = engine.transcribe((sounds[0], RATE), temperature=(0.0, 0.5))
    assert {one.temperature for one in doubted[0].segments} == {0.5}, "a random model is sure of nothing"


@pytest.mark.parametrize(("sound", "language", "said"), [([np.nan], None, "NaN"), ([0.5], "de", "English alone")])
def test_sounds_and_languages_that_cannot_be_are_refused(
    engine: Engine, sound: list[float], language: str | None, said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        engine.transcribe(np.array(sound), language=language)


@pytest.mark.parametrize("condition", [False, True])
def test_windows_one_after_another_are_those_of_generate(engine: Engine, model: Any, condition: bool) -> None:
    import torch
    import transformers

    sounds = [np.concatenate([tone(0.9, hertz) for hertz in (200, 400, 800)]), tone(1.35, 700)]
    found = engine.transcribe(
        [(one, RATE) for one in sounds],
        sequential=True,
        condition_on_previous_text=condition,
        temperature=0.0,
    )
    extract = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    told = {"is_multilingual": False, "no_timestamps_token_id": 105, "prev_sot_token_id": 103}
    told |= {"max_initial_timestamp_index": 50, "return_timestamps": True, "max_length": 64, "temperature": 0.0}
    told |= {"decoder_start_token_id": 100, "suppress_tokens": SUPPRESSED, "eos_token_id": 3, "pad_token_id": 3}
    for sound, transcript in zip(sounds, found, strict=True):
        given = extract(
            sound,
            sampling_rate=RATE,
            return_tensors="pt",
            truncation=False,
            padding="longest",
            return_attention_mask=True,
        )
        config = transformers.GenerationConfig(**told)
        with torch.no_grad():
            expected = model.generate(
                **given, generation_config=config, return_segments=True, condition_on_prev_tokens=condition
            )["segments"][0]
        tokens = [[one for one in part["tokens"].tolist() if one <= 105] for part in expected]
        assert [part.token_ids for part in transcript.segments] == [one for one in tokens if one]
        times = [(float(part["start"]), float(part["end"])) for part, own in zip(expected, tokens, strict=True) if own]
        assert np.allclose([(part.start, part.end) for part in transcript.segments], times)
        assert len(expected) > 1


def test_the_text_so_far_is_told_to_windows_one_after_another_alone(engine: Engine) -> None:
    with pytest.raises(RequestError, match="Set sequential=True too"):
        engine.transcribe(tone(0.5), condition_on_previous_text=True)
