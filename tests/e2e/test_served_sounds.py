"""A Whisper behind HTTP writes down what Engine.transcribe does, by OpenAI's own client."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import yaml

from mllm_compile import Engine
from tests.e2e.test_encoder_decoders import config_of
from tests.model.encoder_decoders import save_speech_tokenizer, save_whisper
from tests.server.harness import running
from tests.sounds import tone, wav_of

pytestmark = pytest.mark.slow


def test_sounds_over_http_are_the_engines(tmp_path: Path) -> None:
    save_whisper(tmp_path / "model")
    save_speech_tokenizer(tmp_path / "model")
    settings = tmp_path / "model/generation_config.json"
    suppressed = {"suppress_tokens": list(range(10, 40)), "begin_suppress_tokens": [3]}
    settings.write_text(json.dumps(json.loads(settings.read_text(encoding="utf-8")) | suppressed), encoding="utf-8")
    wav = wav_of(np.concatenate([tone(0.9, hertz, rate=8000) for hertz in (200, 400, 800)]), rate=8000)
    config = config_of(tmp_path / "model", tmp_path / "cache", runtime={"max_model_len": 64})
    expected: list[Any] = []
    with Engine(config) as engine:
        for timestamps in (False, True):
            expected += engine.transcribe(wav, timestamps=timestamps, temperature=0.0)
        told = {"sequential": True, "condition_on_previous_text": True}
        (walked,) = engine.transcribe(wav, prompt="w50 w51", temperature=0.0, **told)
    (tmp_path / "whisper.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "mllm_compile", "serve", str(tmp_path / "whisper.yaml"), "--port", "0"]
    with (
        running(command, tmp_path / "log") as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        plain = client.audio.transcriptions.create(file=("talk.wav", wav), model="", temperature=0)
        with_times = client.audio.transcriptions.create(
            file=("talk.wav", wav), model="", response_format="verbose_json", temperature=0
        )
        form: Any = {"prompt": "w50 w51", "response_format": "verbose_json", "temperature": 0, "extra_body": told}
        one_by_one = client.audio.transcriptions.create(file=("talk.wav", wav), model="", **form)
        events = list(client.audio.transcriptions.create(file=("talk.wav", wav), model="", stream=True))
    assert plain.text == expected[0].text
    assert events[-1].text == expected[0].text  # type: ignore[union-attr]
    shown = expected[1].as_form("verbose_json")
    found = with_times.model_dump()
    assert one_by_one.text == walked.text and len(one_by_one.segments) == len(walked.segments) > 1  # type: ignore[attr-defined]
    assert [one["tokens"] for one in found["segments"]] == [one["tokens"] for one in shown["segments"]]
    for one, other in zip(found["segments"], shown["segments"], strict=True):
        assert one["avg_logprob"] == pytest.approx(other["avg_logprob"], abs=1e-4)
        assert (one["start"], one["end"], one["text"]) == (other["start"], other["end"], other["text"])
