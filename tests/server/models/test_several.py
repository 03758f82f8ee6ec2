"""Several models of one server: requests by name, states, failures of one, turns on a device without room for all."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.hang_guard import HANG_S
from tests.server.harness import Server, eventually
from tests.server.models.servers import fake_models, states, switches

# Of the first kind only one has room beside one of the second.
_LARGE = {"fixed_bytes": 300 << 10, "token_bytes": 1 << 10, "least_tokens": 100, "most_tokens": 100}
_SMALL = _LARGE | {"fixed_bytes": 100 << 10}
_DEVICE = {"usable_bytes": 700 << 10, "kv_bytes": 700 << 10}
# Four turns long.
LONG = {"max_tokens": 200, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """`a`, `b` and `p` take turns, as only one of the first two has room beside `p`, which is pinned; `f` fails."""
    sizes = {"a": _LARGE, "b": _LARGE, "p": _SMALL}
    settings: dict[str, Any] = {
        name: {"needs": size | _DEVICE, "delay_s": 0.002, "quick": name == "a"} for name, size in sizes.items()
    }
    with fake_models(
        settings | {"f": {"fails": True}}, {"pinned": ["p"], "turn_s": 0.1}, num_bytes=700 << 10
    ) as server:
        yield server
        pids = server.engine_pids()
        assert server.end(signal.SIGINT) == 0
        assert len(pids) == 3 and not any(Path(f"/proc/{pid}").exists() for pid in pids), "its end leaves no process"


def completed(server: Server, model: str, **fields: Any) -> list[int]:
    """The token ids of an answer."""
    answer = server.complete(model=model, return_token_ids=True, **fields)
    assert answer.status == 200, answer.body
    assert answer.json["model"] == model
    return answer.json["choices"][0]["token_ids"]


@pytest.fixture(scope="module")
def expected(server) -> dict[str, list[int]]:
    """The tokens of a long answer of each model, alone."""
    return {name: completed(server, name, **LONG) for name in ("a", "b", "p")}


def test_a_request_is_answered_by_the_model_that_it_names(expected):
    assert expected["a"] != expected["b"]
    assert expected["b"] == expected["p"], "their fakes are alike"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/tokenize"])
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "model: expected one of a, b, p, f, as this server has several"),
        ({"model": None}, 400, "model: expected one of a, b, p, f"),
        ({"model": 3}, 400, "model: expected a text"),
        ({"model": "x"}, 404, "the model 'x' does not exist; this server has a, b, p, f, and their adapters"),
        ([], 400, "the body is JSON, but of type array"),
        (b"{", 400, "the body is no JSON"),
    ],
)
def test_a_request_that_names_no_model_is_refused(server, path, body, status, message):
    answer = server.post(path, body)
    assert (answer.status, answer.error["message"].startswith(message)) == (status, True), answer.body
    assert ("type" in answer.json) == (path == "/v1/messages"), "Anthropic's errors have a type"


def test_models_are_listed_with_their_states(server):
    completed(server, "a")
    assert states(server) == {"a": "running", "b": "parked", "p": "running", "f": "failed"}
    assert server.get("/v1/models/b").json["state"] == "parked"
    assert server.get("/v1/models/x").status == 404
    info = server.get("/server_info").json
    assert info["devices"]["meta"]["given_bytes"] == 600 << 10
    assert info["models"]["f"]["failure"] == "the fake engine does not start"
    assert "f: failed: the fake engine does not start" in server.said


def test_a_model_that_failed_refuses_its_requests_and_the_server_is_ready(server):
    answer = server.complete(model="f")
    assert (answer.status, answer.error["code"]) == (503, "engine_failed")
    assert "the fake engine does not start" in answer.error["message"]
    assert server.get("/ready").status == server.get("/health").status == 200
    assert server.get("/health").json["models"]["f"] == "failed"


def test_what_is_of_no_engine_does_not_wake_one(server):
    completed(server, "a")
    before = switches(server, "b")
    tokens = server.post("/tokenize", {"model": "b", "prompt": "def f():"}).json["tokens"]
    assert server.post("/detokenize", {"model": "b", "tokens": tokens}).json["prompt"] == "def f():"
    rendered = server.post("/v1/completions/render", {"model": "b", "prompt": "def f():"}).json
    assert [one["token_ids"] for one in rendered] == [tokens]
    assert server.get("/tokenizer_info?model=b").status == 200
    assert server.get("/tokenizer_info").status == 400
    assert server.post("/v1/embeddings", {"model": "b", "input": "def"}).status == 404, "it generates"
    assert (states(server)["b"], switches(server, "b")) == ("parked", before)


def test_figures_have_the_models_names(server):
    completed(server, "a")
    text = server.get("/metrics").body.decode()
    for line in (
        'mllm:model_state{model="b",state="parked"} 1.0',
        'mllm:engine_ready{model="a"} 1.0',
        'vllm:num_requests_running{engine="0",model="p",model_name="p"} ',
        'mllm:device_bytes{device="meta"} 716800.0',
        'mllm:device_given_bytes{device="meta"} 614400.0',
    ):
        assert line in text
    assert text.count("# TYPE mllm:requests_running gauge") == 1
    assert text.count("\nprocess_resident_memory_bytes ") == 1


def test_two_models_that_are_both_busy_take_turns_and_lose_nothing(server, expected):
    before = switches(server, "a")
    with ThreadPoolExecutor(9) as clients:
        answers = list(clients.map(lambda name: completed(server, name, **LONG), "abp" * 3))
    assert answers == [expected[name] for name in "abp" * 3]
    assert switches(server, "a") > before
    assert switches(server, "p") == 0, "it is pinned"


def test_a_stream_goes_on_behind_its_models_next_turn(server, expected):
    completed(server, "a")
    before = switches(server, "b")
    with ThreadPoolExecutor(1) as clients:
        events = clients.submit(lambda: server.complete(model="b", stream=True, return_token_ids=True, **LONG).events)
        eventually(lambda: states(server)["b"] == "running", "b runs")
        completed(server, "a")
        tokens = [token for event in events.result() if event for choice in event["choices"]
                  for token in choice["token_ids"] or ()]  # fmt: skip
    assert tokens == expected["b"]
    assert switches(server, "b") > before


def test_an_aborted_request_of_a_parked_model_is_gone(server):
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(server.complete, model="b", request_id="b-1", **(LONG | {"max_tokens": 400}))
        eventually(lambda: server.get("/load").json["models"]["b"]["running"], "b runs")
        completed(server, "a")
        assert server.post("/v1/abort", {"request_id": "cmpl-b-1"}).json == {"aborted": ["cmpl-b-1"]}
        assert answer.result().status == 400


def test_an_engine_that_dies_takes_its_own_requests_alone_and_starts_again(server, expected):
    (pid,) = [pid for pid in server.engine_pids() if Path(f"/proc/{pid}/comm").read_text() == "a\n"]
    with ThreadPoolExecutor(2) as clients:
        hurt = clients.submit(server.complete, model="a", **LONG)
        other = clients.submit(completed, server, "p", **LONG)
        eventually(lambda: server.get("/load").json["models"]["a"]["running"], "a runs")
        os.kill(pid, signal.SIGKILL)
        assert (hurt.result().status, hurt.result().error["code"]) == (503, "engine_lost")
        assert other.result() == expected["p"]
    assert completed(server, "a"), "it waits for the new one"
    assert completed(server, "b")
    assert server.get("/health").status == 200
    assert server.figure('mllm:engine_restarts_total{model="a"}') == 1


@pytest.mark.slow
def test_random_requests_and_deaths_end_in_answers_or_in_errors_of_the_dead(server, expected):
    chance = random.Random(3)

    def ask(name: str) -> None:
        answer = server.complete(model=name, return_token_ids=True, **(LONG | {"max_tokens": 120}))
        if answer.status == 200:
            assert answer.json["choices"][0]["token_ids"] == expected[name][:120]
        else:
            assert (answer.status, answer.error["code"]) == (503, "engine_lost")

    with ThreadPoolExecutor(8) as clients:
        for _ in range(6):
            asked = [clients.submit(ask, chance.choice("abp")) for _ in range(12)]
            os.kill(chance.choice(server.engine_pids()), signal.SIGKILL)
            for one in asked:
                one.result()
    eventually(lambda: {"loading"}.isdisjoint(states(server).values()), "all are served again")
    assert {name: completed(server, name, **LONG) for name in expected} == expected


@pytest.mark.slow
def test_a_server_without_any_model_that_starts_ends_with_the_reasons():
    with fake_models({"x": {"fails": True}, "y": {"fails": True}}, waits=False) as server:
        assert server.process.wait(HANG_S) == 2
        assert "error: x: the fake engine does not start; y: the fake engine does not start" in server.said
        assert "  ready  " not in server.said


@pytest.mark.slow
def test_what_runs_at_its_end_is_answered():
    needs = {"needs": _LARGE | _DEVICE, "delay_s": 0.003}
    several = fake_models({"a": needs, "b": needs}, {"turn_s": 0.1}, num_bytes=700 << 10)
    with several as server, ThreadPoolExecutor(2) as clients:
        answers = [clients.submit(server.complete, model=name, **LONG) for name in ("a", "b")]
        eventually(lambda: server.get("/load").json["server_load"] == 2, "both are asked")
        assert server.end(signal.SIGINT) == 0
        assert [answer.result().status for answer in answers] == [200, 200]
