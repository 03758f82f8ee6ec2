"""`mllm-compile chat`: what is typed, and what is answered."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from mllm_compile.cli import run
from mllm_compile.cli.chat import _engine, _params, converse
from mllm_compile.engine.core.adapter_queue import AdapterParts
from tests.adapters.fake_device import BASE, AdapterRunner, FakeDevice, adapter_folder
from tests.fakes import FakeStepRunner, fake_engine, recite
from tests.server.harness import Server, fake_server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with fake_server({"api_keys": ["k"]}) as server:
        yield server


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))


def test_an_adapter_answers_by_its_name(monkeypatch, capsys, tmp_path):
    device, runner = FakeDevice(), AdapterRunner()
    device.reading.set()
    runner.device = device
    with fake_engine(runner, adapters=AdapterParts(BASE, device)) as engine:
        engine.load_adapter("sql", adapter_folder(tmp_path / "sql", 3))
        answers = []
        for adapter in (None, "sql"):
            typed(monkeypatch, "hi")
            converse(_engine(engine, adapter), None, {"max_tokens": 9, "ignore_eos": True})
            answers.append(capsys.readouterr().out)
    assert answers[0] != answers[1]


def test_an_adapter_of_a_server_is_the_model_that_is_asked_for(server, monkeypatch, capsys):
    typed(monkeypatch, "hi")
    assert run(["chat", server.url, "--api-key", "k", "--adapter", "sql"]) == 1
    assert "404: the model 'sql' does not exist; this server has fake" in capsys.readouterr().err
    assert run(["chat", server.url, "--adapter", "sql=/sql"]) == 2
    assert "--adapter: expected NAME, as the server has loaded it" in capsys.readouterr().err


def test_each_answer_is_printed_with_its_speed_and_the_conversation_goes_on(monkeypatch, capsys):
    asked: list[Any] = []

    def ask(messages: list[dict[str, str]], settings: dict[str, Any]) -> Iterator[tuple[str, int]]:
        asked.append(([message["content"] for message in messages], dict(settings)))
        yield "an", 1
        yield "swer", 2

    typed(
        monkeypatch, "one", "", "/set temperature 0.5", "two", "/reset", "/set temperature null", "three", "/nonsense"
    )
    converse(ask, "be brief", {"max_tokens": 3})
    assert asked == [
        (["be brief", "one"], {"max_tokens": 3}),
        (["be brief", "one", "answer", "two"], {"max_tokens": 3, "temperature": 0.5}),
        (["be brief", "three"], {"max_tokens": 3}),
    ]
    told = capsys.readouterr()
    assert told.out == "answer\n" * 3
    assert told.err.count(", 3 tokens") == 3
    assert "/reset forgets" in told.err


def test_a_refusal_is_told_and_its_message_forgotten(monkeypatch, capsys):
    with fake_engine(FakeStepRunner(recite("hi"))) as engine:
        typed(monkeypatch, "/set top_p 7", "one", "/set top_p 1", "/set no_such 1", "two", "/set no_such null", "say:")
        converse(_engine(engine, None), None, {"temperature": 0})
    told = capsys.readouterr()
    assert told.err.count("error: ") == 2
    assert "top_p: expected a number" in told.err
    assert told.out.endswith("\n")


def test_a_setting_that_cannot_be_is_refused_when_it_is_typed_and_not_kept(monkeypatch, capsys):
    settings: dict[str, Any] = {"temperature": 0}
    with fake_engine(FakeStepRunner(recite("hi"))) as engine:
        typed(monkeypatch, "/set top_p 7", "/set no_such 1", "/set max_tokens 2", "say:")
        assert converse(_engine(engine, None), None, settings, check=partial(_params, engine))
    told = capsys.readouterr()
    assert "top_p: expected a number" in told.err
    assert "no_such is no field of SamplingParams" in told.err
    assert settings == {"temperature": 0, "max_tokens": 2}


def test_a_setting_that_a_server_does_not_know_is_told(server, monkeypatch, capsys):
    typed(monkeypatch, "/set no_such 1", "def")
    assert run(["chat", server.url, "--api-key", "k", "--max-tokens", "5"]) == 0
    assert f"{server.url} knows no no_such, and answers without" in capsys.readouterr().err


def test_a_server_is_chatted_with_by_its_url(server, monkeypatch, capsys):
    typed(monkeypatch, "def")
    assert run(["chat", server.url, "--api-key", "k", "--max-tokens", "5", "--temperature", "0"]) == 0
    told = capsys.readouterr()
    body = {"messages": [{"role": "user", "content": "def"}], "max_tokens": 5, "temperature": 0}
    answer = server.post("/v1/chat/completions", body, headers={"authorization": "Bearer k"}).json
    assert told.out == answer["choices"][0]["message"]["content"] + "\n"
    assert "5 tokens" in told.err


def test_a_server_that_refuses_or_is_not_there_is_one_line(server, monkeypatch, capsys):
    typed(monkeypatch, "def")
    assert run(["chat", server.url, "--api-key", "wrong"]) == 1, "a script is told"
    said = capsys.readouterr().err
    assert "answers 401: this server needs a key" in said
    assert "Give the key as --api-key, or as MLLM_API_KEY" in said
    typed(monkeypatch, "def")
    assert run(["chat", "http://127.0.0.1:1"]) == 1
    assert "no server listens there. Start one: mllm-compile serve MODEL" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "http://127.0.0.1:80a0", "http://127.0.0.1:70000", "http://[::1"]
)
def test_a_malformed_url_of_a_server_is_one_line(url, capsys):
    assert run(["chat", url]) == 2
    assert "is no URL of a server; expected such as http://127.0.0.1:8000" in capsys.readouterr().err
