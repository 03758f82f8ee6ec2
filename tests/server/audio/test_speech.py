"""Sounds over HTTP: each window reaches the engine as it is, and answers have OpenAI's forms, also as a stream."""

from __future__ import annotations

import signal
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest

from mllm_compile.engine.speech.cuts import cut
from mllm_compile.engine.speech.sequential import Walk
from mllm_compile.media.sound import read_wav
from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.audio.requests import Speech
from tests.fake_speech import (
    END_S,
    LANGUAGE,
    LOG_MEL,
    MUMBLED,
    SILENT,
    SUNG,
    SYLLABLES,
    UNDERSTOOD,
    said_of,
    said_of_window,
)
from tests.hang_guard import HANG_S
from tests.server.audio.test_form import TYPE, form_of
from tests.server.harness import Answer, Server, eventually, fake_server
from tests.sounds import RATE, tone, wav_of

PATH = "/v1/audio/transcriptions"
SOUND = np.concatenate([tone(0.9, hertz) for hertz in (200, 400, 800)])
WAV = wav_of(SOUND)


def expected_of(wav: bytes) -> list[tuple[float, str]]:
    """The begin, and the text, of each window."""
    samples, _ = read_wav(wav)
    return [(at / RATE, said_of(part)) for at, part in cut(samples, RATE, RATE)]


TEXT = "".join(text for _, text in expected_of(WAV)).strip()


@pytest.fixture(scope="module")
def stuck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, no step ends."""
    return tmp_path_factory.mktemp("stuck") / "stuck"


@pytest.fixture(scope="module")
def server(stuck: Path) -> Iterator[Server]:
    with fake_server(settings={"speech": True}, environment={"MLLM_FAKE_STUCK": str(stuck)}) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def send(server: Server, *parts: tuple[str, bytes | str], path: str = PATH) -> Answer:
    return server.post(path, form_of(*parts), headers={"content-type": TYPE})


def test_openais_client_gets_the_text(client: openai.OpenAI) -> None:
    assert len(expected_of(WAV)) == 3
    answer = client.audio.transcriptions.create(file=("talk.wav", WAV), model="fake")
    assert (answer.text, answer.usage.model_dump()) == (TEXT, {"type": "duration", "seconds": 3})  # type: ignore[union-attr]
    english = client.audio.translations.create(file=("talk.wav", WAV), model="fake", prompt="names: Ann")
    assert english.text == TEXT
    plain: Any = client.audio.transcriptions.create(file=WAV, model="fake", response_format="text", language="en")
    assert plain == TEXT + "\n"


def test_openais_client_gets_segments(client: openai.OpenAI, server: Server) -> None:
    told = client.audio.transcriptions.create(
        file=("talk.wav", WAV), model="fake", response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert (told.text, told.language, told.duration) == (TEXT, LANGUAGE, 2.7)
    assert told.segments is not None
    places = [(one.start, one.end, one.text) for one in told.segments]
    assert places == [
        (pytest.approx(at, abs=0.01), pytest.approx(at + END_S, abs=0.01), text.strip())
        for at, text in expected_of(WAV)
    ]
    srt = send(server, ("file", WAV), ("response_format", "srt"))
    assert srt.body.decode().count(" --> ") == 3
    assert srt.headers["content-type"] == "text/plain; charset=utf-8"
    vtt = send(server, ("file", WAV), ("response_format", "vtt"))
    assert vtt.body.startswith(b"WEBVTT") and vtt.headers["content-type"].startswith("text/vtt")


def test_a_stream_has_the_windows_in_their_order(client: openai.OpenAI) -> None:
    events = list(client.audio.transcriptions.create(file=("talk.wav", WAV), model="fake", stream=True))
    assert {one.type for one in events[:-1]} == {"transcript.text.delta"}
    assert "".join(one.delta for one in events[:-1]) == TEXT  # type: ignore[union-attr]
    assert (events[-1].type, events[-1].text) == ("transcript.text.done", TEXT)  # type: ignore[union-attr]


def told_of(server: Server, samples: np.ndarray, *parts: tuple[str, str]) -> tuple[str, list[float]]:
    """The text of a sound, and the temperatures of its segments."""
    given = ("file", wav_of(samples)), ("language", "en"), ("response_format", "verbose_json")
    told = send(server, *given, *parts).json
    return told["text"], [one["temperature"] for one in told["segments"]]


@pytest.mark.parametrize("way", [(), (("sequential", "true"),)])
def test_doubted_windows_are_tried_at_the_next_temperature(server: Server, way: Any) -> None:
    assert told_of(server, SUNG, *way) == (said_of(SUNG).strip(), [0.2])
    assert told_of(server, MUMBLED, *way) == (said_of(MUMBLED).strip(), [UNDERSTOOD])
    assert told_of(server, SILENT, *way) == ("", [])
    assert told_of(server, SOUND, *way)[1] == [0.0] * 3


def test_doubted_windows_alone_are_tried_again(server: Server) -> None:
    sound = np.concatenate([tone(0.8), np.zeros(160, dtype=np.float32), SUNG])  # it is cut amid 20 ms of silence
    (_, first), (_, last) = cut(read_wav(wav_of(sound))[0], RATE, RATE)
    assert np.array_equal(last, SUNG)
    assert told_of(server, sound) == ((said_of(first) + said_of(SUNG)).strip(), [0.0, 0.2])


def test_one_temperature_and_a_stream_are_believed(server: Server, client: openai.OpenAI) -> None:
    for temperature in ("0", "0.3"):
        text, temperatures = told_of(server, MUMBLED, ("temperature", temperature))
        assert (text, temperatures) == (said_of(MUMBLED).strip(), [float(temperature)])
    events = list(client.audio.transcriptions.create(file=("a.wav", wav_of(SUNG)), model="fake", stream=True))
    assert events[-1].text == SYLLABLES.strip()  # type: ignore[union-attr]


BOTH = ("sequential", "true"), ("condition_on_previous_text", "true")


def walked_of(wav: bytes) -> list[tuple[float, str]]:
    """The begin, and the text, of windows one after another; the fake's answers are closed by a time."""
    walk, found = Walk.of(read_wav(wav)[0], LOG_MEL, [], 0), []
    while not walk.is_at_end:
        found.append((walk.seconds, said_of_window(walk.window(LOG_MEL.frames))))
        walk.frame += LOG_MEL.frames
    return found


def test_windows_one_after_another_are_an_answer_like_others(server: Server) -> None:
    walked = walked_of(WAV)
    assert len(walked) == 3
    parts = ("file", WAV), ("sequential", "true"), ("request_id", "mine"), ("something", "new")
    told = send(server, *parts, ("response_format", "verbose_json"), ("condition_on_previous_text", "true"))
    assert told.json["text"] == "".join(text for _, text in walked).strip()
    assert [(one["start"], one["end"]) for one in told.json["segments"]] == [(at, at + END_S) for at, _ in walked]
    assert told.json["language"] == LANGUAGE and told.json["usage"] == {"type": "duration", "seconds": 3}
    assert (told.headers["x-request-id"], told.headers["x-mllm-ignored"]) == ("transcript-mine", "something")
    assert send(server, *parts, ("response_format", "text")).body.decode().strip() == told.json["text"]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((("condition_on_previous_text", "true"),), "Set sequential too"),
        ((("sequential", "true"), ("stream", "true")), "whose text comes whole"),
        ((("sequential", "true"), ("chunking_strategy", "auto")), "whose windows begin at times"),
        ((("sequential", "true"), ("prompt", "<|en|>")), "the model's own token"),
        ((*BOTH, ("prompt", "<|en|>")), "the model's own token"),
        ((("sequential", "1000 times"),), "sequential"),
    ],
)
def test_what_does_not_go_with_windows_one_after_another_is_refused(server: Server, parts: Any, said: str) -> None:
    refused = send(server, ("file", SHORT), *parts)
    assert refused.status == 400 and said in refused.error["message"]


def with_header(wav: bytes, at: int, number: int, form: str = "<I") -> bytes:
    """A WAV file with another number in its header."""
    return wav[:at] + struct.pack(form, number) + wav[at + struct.calcsize(form) :]


SHORT = wav_of(tone(0.3))
BAD = {
    "no samples": (wav_of(np.zeros(0)), "no samples"),
    "words": (b"hello", "no WAV file|cannot be read"),
    "FLAC": (b"fLaC\0\0\0\x22", "it is FLAC|cannot be read"),
    "MP3": (b"ID3\4\0\0", "it is MP3|cannot be read"),
    "no channels": (with_header(SHORT, 22, 0, "<H"), "no WAV file|0 channels"),
    "many channels": (with_header(SHORT, 22, 999, "<H"), "999 channels"),
    "rate": (with_header(SHORT, 24, 0xFFFFFFFF), "samples a second"),
    "no rate": (with_header(SHORT, 24, 0), "samples a second"),
    "64 bits": (with_header(SHORT, 34, 64, "<H"), "samples of 64 bits"),
    "floats": (with_header(SHORT, 20, 3, "<H"), "no WAV file"),
    "cut": (SHORT[:30], "no WAV file"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_sound_is_refused_and_hurts_no_other(server: Server, kind: str) -> None:
    wav, said = BAD[kind]
    refused = send(server, ("file", wav))
    assert refused.status == 400
    assert any(one in refused.error["message"] for one in said.split("|")), refused.error
    assert send(server, ("file", SHORT), ("language", "en")).json["text"] == expected_of(SHORT)[0][1].strip()


@pytest.mark.parametrize(
    ("parts", "status", "said"),
    [
        ((("file", SHORT), ("language", "xx")), 400, "language: expected a code"),
        ((("file", SHORT), ("model", "other")), 404, "other"),
        ((("file", SHORT), ("language", "en"), ("priority", "9" * 30)), 400, "priority"),
        ((("file", b"\0" * (27 << 20)),), 413, "larger than 26 MiB"),
    ],
)
def test_what_cannot_be_is_refused(server: Server, parts: Any, status: int, said: str) -> None:
    refused = send(server, *parts)
    assert refused.status == status
    assert said in refused.error["message"]


def test_a_truncated_file_is_read_as_far_as_it_goes(server: Server) -> None:
    piped = with_header(with_header(SHORT, 40, 0xFFFFFFFF), 4, 0xFFFFFFFF)  # as ffmpeg leaves it
    for file, whole in ((SHORT[:-1001], SHORT[:-1001]), (piped, SHORT)):
        assert send(server, ("file", file), ("language", "en")).json["text"] == expected_of(whole)[0][1].strip()


def test_many_windows_reach_the_engine(server: Server) -> None:
    long = wav_of(tone(60))
    for _ in range(3):
        text = send(server, ("file", long), ("language", "en")).json["text"]
        assert text == "".join(one for _, one in expected_of(long)).strip()


def test_requests_beside_each_other_get_their_own(server: Server) -> None:
    wavs = [wav_of(tone(0.2 + 0.17 * number, 150.0 * (number + 1))) for number in range(12)]
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        found[number] = send(server, ("file", wavs[number])).json["text"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(wavs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    texts = ["".join(text for _, text in expected_of(wav)).strip() for wav in wavs]
    assert [found[number] for number in range(len(wavs))] == texts


def test_the_model_is_listed_and_texts_are_refused_by_name(server: Server) -> None:
    assert server.get("/v1/models").json["data"][0]["id"] == "fake"
    refused = server.complete()
    assert refused.status == 400 and "sounds" in refused.error["message"]
    described = server.get("/openapi.json").json["paths"][PATH]["post"]["requestBody"]["content"]
    assert list(described) == ["multipart/form-data"]


@pytest.mark.parametrize(("language", "sequential"), [("en", "false"), ("", "false"), ("en", "true")])
def test_a_client_that_leaves_ends_its_windows(server: Server, stuck: Path, language: str, sequential: str) -> None:
    stuck.touch()
    try:
        body = form_of(("file", wav_of(np.tile(SOUND, 4))), ("language", language), ("sequential", sequential))
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: {TYPE}\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + body)
            eventually(lambda: server.get("/load").json["server_load"] > 0, "its windows run")
        eventually(lambda: server.get("/load").json == {"server_load": 0, "running": 0, "waiting": 0}, "they end")
    finally:
        stuck.unlink()
    assert send(server, ("file", SHORT), ("language", "en")).json["text"]


def test_a_shutdown_lets_windows_one_after_another_come_to_their_end(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    options, held = {"shutdown_timeout_s": HANG_S}, {"MLLM_FAKE_STUCK": str(gate)}
    with fake_server(options, {"speech": True}, held) as server:
        with ThreadPoolExecutor() as threads:
            asked = ("file", WAV), ("language", "en"), ("sequential", "true")
            running = threads.submit(send, server, *asked)
            eventually(lambda: server.get("/load").json["server_load"] > 0, "the first window runs")
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: server.get("/ready").json["state"] == "draining", "the server ends")
            assert send(server, *asked).status == 503
            gate.unlink()
            answer = running.result()
        assert answer.status == 200, answer.body
        assert answer.json["text"] == "".join(text for _, text in walked_of(WAV)).strip()
        assert server.process.wait() == 0


def test_another_model_refuses_sounds_by_name() -> None:
    with pytest.raises(ApiError, match="reads no sounds") as caught:
        Speech.of(SimpleNamespace(decoder=None, tokenizer=None))  # type: ignore[arg-type]
    assert (caught.value.status, caught.value.param) == (400, "model")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_a_text_is_told_where_sounds_are_sent(server: Server, path: str) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    asked = {"/v1/completions": {"prompt": "Hello"}, "/v1/responses": {"input": "Hello"}}.get(path, chat)
    answer = server.post(path, asked)
    assert answer.status == 400
    assert "reads no texts. Send a sound to /v1/audio/transcriptions" in answer.error["message"]
