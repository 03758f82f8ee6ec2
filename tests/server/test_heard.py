"""Sounds in chats over HTTP: OpenAI's input_audio and vLLM's audio_url; the engine behind it is a fake."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.harness import Answer, Server, eventually, fake_server
from tests.sounds import tone, wav_of

CHAT = "/v1/chat/completions"
WAV = wav_of(tone(1.0))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with fake_server(settings={"sounds": "qwen3_asr"}) as server:
        yield server


def part_of(samples: bytes, **fields: Any) -> dict[str, Any]:
    return {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(samples).decode(), "format": "wav"} | fields,
    }


def ask(server: Server, *parts: dict[str, Any]) -> Answer:
    content = [*parts, {"type": "text", "text": "What?"}]
    return server.post(CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0})


def test_a_chat_with_sounds_is_answered(server: Server) -> None:
    url = f"data:audio/wav;base64,{base64.b64encode(WAV).decode()}"
    answer = ask(server, part_of(WAV), {"type": "audio_url", "audio_url": {"url": url}})
    assert answer.status == 200, answer.body
    assert answer.json["usage"]["prompt_tokens"] == 2 * 13 + 6
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": [part_of(WAV), {"type": "text", "text": "What?"}]}]
        said = client.chat.completions.create(model="fake", messages=messages, max_tokens=4, temperature=0)
    assert said.usage is not None and said.usage.prompt_tokens == 13 + 6
    eventually(lambda: not list(Path("/dev/shm").glob(f"mllm-media-{server.process.pid}-*")))


def test_a_bad_sound_is_one_400_and_others_are_answered(server: Server) -> None:
    bad = {
        "no WAV file": part_of(b"RIFF nothing"),
        "format: expected wav": part_of(WAV, format="pcm16"),
        "no base64": part_of(WAV, data="?"),
        "none is fetched": {"type": "audio_url", "audio_url": {"url": "https://host/a.wav"}},
        "expected a data URL": {"type": "audio_url", "audio_url": {"url": "/etc/passwd"}},
        "takes no images": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        "context is": part_of(wav_of(tone(80.0))),
    }
    with ThreadPoolExecutor() as pool:
        good = [pool.submit(ask, server, part_of(WAV)) for _ in range(3)]
        refused = {words: pool.submit(ask, server, part) for words, part in bad.items()}
        for words, answer in refused.items():
            assert answer.result().status == 400, words
            assert words in answer.result().error["message"]
        assert {answer.result().status for answer in good} == {200}
    assert ask(server, part_of(bytes(16 << 20))).status == 413
