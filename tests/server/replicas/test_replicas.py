"""Two engines of one model behind one port, over fakes: prefixes and sessions go home, and one engine dies alone."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.fake_device import adapter_folder
from tests.hang_guard import HANG_S
from tests.server.harness import Server, eventually, running

LONG = {"max_tokens": 480, "ignore_eos": True, "temperature": 0, "stream": True}


@contextmanager
def replicas(
    folder: Path, options: dict[str, Any] | None = None, settings: dict[str, Any] | None = None, *, waits: bool = True
) -> Iterator[Server]:
    given = {"port": 0, "served_names": ["fake"], "api_keys": ["k"], **(options or {})}
    command = [sys.executable, "-m", "tests.server.replicas.fake_front"]
    command += [json.dumps(given), "2", json.dumps(settings or {"quick": True, "delay_s": 0.02})]
    with running(command, folder / "log", waits=waits) as server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with replicas(tmp_path_factory.mktemp("replicas"), {"api_keys": []}) as server:
        eventually(lambda: set(states(server).values()) == {"running"}, "both engines")
        yield server
        assert server.end(signal.SIGINT) == 0


def states(server: Server) -> dict[str, str]:
    return server.get("/health").json["engines"]


def prompts_of(server: Server) -> list[int]:
    """How many requests each engine has answered."""
    text = server.get("/metrics").body.decode()
    found = [
        float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:request_prompt_tokens_count{")
    ]
    return [int(one) for one in found]


def prefix(name: str) -> str:
    return f"{name} lists the items of the mapping. " * 22


def test_a_prefix_goes_home_and_others_go_elsewhere(server):
    def cached(prompt: str) -> int:
        answer = server.complete(prompt=prompt)
        assert answer.status == 200, answer.body
        return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]

    before = prompts_of(server)
    assert [cached(prefix(name)) for name in "abcd"] == [0] * 4
    assert all(cached(prefix(name) + "More.") > 64 for name in "dacb"), "each is where its prefix is"
    assert [now - was for now, was in zip(prompts_of(server), before, strict=True)] == [4, 4]


def test_a_session_stays_and_is_told_of_and_ended_by_its_engine(server):
    for name in ("s1", "s2", "s3"):
        for _ in range(2):
            assert server.complete(prompt=prefix(name), session_id=name).status == 200
        state = server.get(f"/v1/sessions/{name}").json
        assert (state["id"], state["turns"]) == (name, 2)
        assert server.ask("DELETE", f"/v1/sessions/{name}").json["deleted"] is True
    assert server.get("/v1/sessions/unknown").status == 404


def test_the_server_is_one_model_with_figures_of_each_engine(server):
    assert [card["id"] for card in server.get("/v1/models").json["data"]] == ["fake"]
    assert server.get("/v1/models/fake").json["id"] == "fake" and server.get("/v1/models/x").status == 404
    assert server.complete(model="x").status == 404
    text = server.get("/metrics").body.decode()
    for number in (0, 1):
        assert f'mllm:engine_state{{engine="{number}",state="running"}} 1.0' in text
        assert f'vllm:num_requests_running{{engine="{number}",model_name="fake"}} ' in text
    assert sum(line.startswith("process_resident_memory_bytes ") for line in text.splitlines()) == 1
    assert set(server.get("/load").json["engines"]) == {"0", "1"}
    info = server.get("/server_info").json
    assert info["devices"] == {"0": None, "1": None} and set(info["engines"]) == {"0", "1"}
    assert server.get("/ready").status == server.get("/ping").status == 200
    tokens = server.post("/tokenize", {"prompt": "def f():"}).json["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json["prompt"] == "def f():"
    assert server.post("/v1/completions/render", {"prompt": "def f():"}).json[0]["token_ids"] == tokens


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_each_interface_goes_home(server, path):
    field = "input" if path.endswith("responses") else "messages"
    said = [{"role": "user", "content": prefix(path)}]

    def asked(turns: list[dict[str, str]]) -> None:
        bound = "max_output_tokens" if field == "input" else "max_tokens"
        answer = server.post(path, {field: turns, bound: 4})
        assert answer.status == 200, answer.body

    before = prompts_of(server)
    asked(said)
    first = [now - was for now, was in zip(prompts_of(server), before, strict=True)]
    for _ in range(3):
        said = [*said, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "More."}]
        asked(said)
    assert [now - was for now, was in zip(prompts_of(server), before, strict=True)] == [4 * one for one in first]


def test_an_abort_finds_the_engine_of_its_request(server):
    with ThreadPoolExecutor(2) as clients:
        asked = [clients.submit(server.complete, **LONG, request_id=f"r{number}") for number in range(2)]
        eventually(lambda: server.get("/load").json["server_load"] == 2, "both run")
        ids = [f"cmpl-r{number}" for number in range(2)]
        assert sorted(server.post("/v1/abort", {"request_id": ids}).json["aborted"]) == ids
        assert all(b'"aborted"' in one.result().body for one in asked)


def test_an_engine_that_dies_takes_its_own_requests_alone_and_starts_again(server):
    with ThreadPoolExecutor(2) as clients:
        asked = [clients.submit(server.complete, **LONG, request_id=f"d{number}") for number in range(2)]
        eventually(
            lambda: [one["running"] for one in server.get("/load").json["engines"].values()] == [1, 1], "one each"
        )
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        eventually(lambda: any(one.done() for one in asked), "one is told")
        lost, other = sorted(asked, key=lambda one: not one.done())
        assert b"the engine of replica" in lost.result().body and b'"engine_lost"' in lost.result().body
        for number in range(4):
            assert server.complete(prompt=f"{number}").status == 200, "the other engine answers meanwhile"
        assert server.get("/ready").status == server.get("/health").status == 200
        eventually(lambda: set(states(server).values()) == {"running"}, "it starts again")
        server.post("/v1/abort", {"request_id": ["cmpl-d0", "cmpl-d1"]})
        assert b"engine_lost" not in other.result().body
    assert (
        server.figure('mllm:engine_restarts_total{engine="0"}')
        + server.figure('mllm:engine_restarts_total{engine="1"}')
        == 1
    )


def test_engines_that_cannot_start_end_the_server_with_the_reason(tmp_path):
    with replicas(tmp_path, settings={"fails": True}, waits=False) as server:
        assert server.process.wait(HANG_S) == 2
        assert "replica 0: the fake engine does not start; replica 1: the fake engine does not start" in server.said
        assert "  ready  " not in server.said


def test_adapters_of_the_start_are_every_engines(tmp_path):
    settings = {"adapters": {"law": str(adapter_folder(tmp_path / "law", 3))}}
    with replicas(tmp_path, {"api_keys": []}, settings) as server:
        eventually(lambda: set(states(server).values()) == {"running"}, "both engines")
        assert [card["id"] for card in server.get("/v1/models").json["data"]] == ["fake", "law"]
        asked = {"temperature": 0, "return_token_ids": True}
        plain, *told = [server.complete(**asked).json, *(server.complete(model="law", **asked).json for _ in range(3))]
        texts = {str(one["choices"][0]["token_ids"]) for one in told}
        assert len(texts) == 1 and str(plain["choices"][0]["token_ids"]) not in texts
        assert min(prompts_of(server)) > 0, "short prompts go to each in turn"
        refused = server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/x"})
        assert refused.status == 403 and "adapters are as the server was started with" in refused.error["message"]


def test_models_that_pool_are_served(tmp_path):
    with replicas(tmp_path, {"api_keys": []}, {"pooling": {}}) as server:
        eventually(lambda: set(states(server).values()) == {"running"}, "both engines")
        answers = [server.post("/v1/embeddings", {"input": ["def", "f"]}) for _ in range(4)]
        assert {answer.status for answer in answers} == {200}
        assert len({str(answer.json["data"]) for answer in answers}) == 1
