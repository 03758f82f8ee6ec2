"""More work than the engine can do, clients that leave, readers that do not read."""

from __future__ import annotations

import json
import math
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mllm_compile.bench.serving.load import ServeWork, run_load
from tests.hang_guard import HANG_S
from tests.server.harness import Server, eventually, fake_server

MANY_TOKENS = 60_000  # of an answer that a test ends, at any speed: minutes
LIMITS = {"max_running_requests": 2, "max_model_len": 2 * MANY_TOKENS, "num_pages": MANY_TOKENS}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with fake_server({"max_queue": 4}, {"limits": LIMITS, "delay_s": 0.003}) as server:
        yield server


@pytest.fixture(autouse=True)
def _left_idle(server: Server) -> Iterator[None]:
    yield
    eventually(lambda: server.figure("mllm:requests_running") == 0, "the engine is idle again")
    assert server.figure("mllm:requests_waiting") == 0


def test_a_burst_that_has_slots_is_not_refused():
    limits = {"max_running_requests": 64, "max_model_len": 512, "num_pages": 4096}
    with fake_server({"max_queue": 2}, {"limits": limits, "delay_s": 0.02}) as server:
        bodies = [{"prompt": [5, 6], "max_tokens": 20, "ignore_eos": True} for _ in range(40)]
        connections = [server.open("/v1/completions", body) for body in bodies]
        heads = [read_some(connection).split(b"\r\n")[0] for connection in connections]
        for connection in connections:
            connection.close()
    assert set(heads) == {b"HTTP/1.1 200 OK"}


def long_request(**fields: Any) -> dict[str, Any]:
    return {"prompt": "def", "max_tokens": MANY_TOKENS, "ignore_eos": True, **fields}


def is_running(server: Server, count: int) -> bool:
    return server.figure("mllm:requests_running") == count


def read_some(connection: socket.socket) -> bytes:
    """The answer's head, at least."""
    return connection.recv(100)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request_whether_it_runs_or_waits(server, stream):
    steps = server.figure("mllm:steps_total")
    connections = [server.open("/v1/completions", long_request(stream=stream)) for _ in range(2)]
    eventually(lambda: is_running(server, 2))
    connections += [server.open("/v1/completions", long_request(stream=stream)) for _ in range(3)]
    eventually(lambda: server.figure("mllm:requests_waiting") == 3)
    for connection in reversed(connections):  # those that wait first: none of them may begin
        connection.close()
    eventually(lambda: server.figure("mllm:connections_generating") == 0)
    eventually(lambda: is_running(server, 0))
    assert server.figure("mllm:requests_waiting") == 0
    assert server.figure("mllm:steps_total") - steps < MANY_TOKENS, "they were not computed to their end"


def test_too_many_requests_are_refused_at_once_and_told_when_to_come_again(tmp_path):
    gate = tmp_path / "gate"
    gate.touch()  # none ends before all have come
    held = {"MLLM_FAKE_STUCK": str(gate)}
    with fake_server({"max_queue": 4}, {"limits": LIMITS}, held) as server, ThreadPoolExecutor(24) as threads:
        asked = [threads.submit(server.complete, max_tokens=20, ignore_eos=True) for _ in range(24)]
        eventually(lambda: server.figure("mllm:requests_refused_total") >= 18)
        gate.unlink()
        answers = [one.result() for one in asked]
        refused = server.figure("mllm:requests_refused_total")
    statuses = [answer.status for answer in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 4, "so many wait"
    for answer in answers:
        if answer.status == 429:
            assert answer.error["code"] == "queue_full"
            assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert refused == statuses.count(429)


def test_prompts_that_come_together_begin_in_one_step():
    with fake_server() as server:
        answer = server.post("/v1/completions", {"prompt": [[5 + i, 6] for i in range(8)], "max_tokens": 1})
        assert len(answer.json["choices"]) == 8
        eventually(lambda: server.figure("mllm:steps_total") > 0)
        assert server.figure("mllm:steps_total") == 1


def test_a_list_longer_than_the_queue_is_taken_when_nothing_waits(server):
    answer = server.complete(prompt=["def"] * 9, max_tokens=2)
    assert (answer.status, len(answer.json["choices"])) == (200, 9)


def test_a_slow_reader_gets_all_of_its_text_and_holds_up_nobody(server):
    body = {"prompt": [40, 41, 42], "max_tokens": 1000, "ignore_eos": True, "temperature": 0, "logprobs": 20}
    data = json.dumps({**body, "stream": True}).encode()
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    slow.settimeout(HANG_S)
    slow.connect(("127.0.0.1", server.port))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    before = server.figure("mllm:generated_tokens_total")
    slow.sendall(head % len(data) + data)
    eventually(lambda: server.figure("mllm:generated_tokens_total") > before)
    assert server.complete(max_tokens=5).status == 200
    eventually(lambda: is_running(server, 0), "its own request has ended though it reads nothing")
    received = bytearray()
    while part := slow.recv(1 << 16):
        received += part
    slow.close()
    events = [json.loads(event) for event in re.findall(r"data: (\{.*\})\n", received.decode())]
    whole = server.post("/v1/completions", body).json["choices"][0]
    assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]
    tokens = [token for event in events for token in event["choices"][0]["logprobs"]["tokens"]]
    assert tokens == whole["logprobs"]["tokens"]


def test_a_request_is_aborted_by_its_name(server):
    connection = server.open("/v1/completions", long_request(stream=True, request_id="long"))
    eventually(lambda: is_running(server, 1))
    read_some(connection)
    assert server.post("/v1/abort", {"request_id": ["cmpl-long", "cmpl-none"]}).json == {"aborted": ["cmpl-long"]}
    received = b""
    while b"[DONE]" not in received:
        received += connection.recv(1 << 16)
    connection.close()
    assert b'"code":"aborted"' in received


def test_an_id_in_use_is_refused(server):
    connection = server.open("/v1/completions", long_request(stream=True, request_id="twice"))
    eventually(lambda: is_running(server, 1))
    answer = server.complete(request_id="twice")
    assert (answer.status, answer.error["param"]) == (400, "request_id")
    connection.close()


@pytest.mark.parametrize(
    ("limit", "status", "code"),
    [({"max_queue_s": 0.5}, 429, "queue_timeout"), ({"request_timeout_s": 0.5}, 408, "request_timeout")],
)
def test_a_request_that_waits_or_takes_too_long_is_ended(limit, status, code):
    with fake_server(limit, {"limits": {**LIMITS, "max_running_requests": 1}, "delay_s": 0.01}) as server:
        running = server.open("/v1/completions", long_request(stream=True))
        if "max_queue_s" in limit:
            eventually(lambda: is_running(server, 1))
        ended = server.post("/v1/completions", long_request())
        assert (ended.status, ended.error["code"]) == (status, code)
        running.close()
        eventually(lambda: is_running(server, 0))


def resident_mib(pid: int) -> float:
    """The memory of a process that is in RAM."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) / 1024


def test_a_thousand_connections_at_once_are_all_answered():
    limits = {"max_running_requests": 256, "max_num_batched_tokens": 4096, "num_pages": 256 * 10}
    work = ServeWork(rates=(math.inf,), requests=1000, input_tokens=16, output_tokens=8, clients=4)
    with fake_server(settings={"limits": limits, "quick": True}) as server:
        run_load(server.url, None, ServeWork(rates=(math.inf,), requests=4, input_tokens=16, output_tokens=8))
        before = resident_mib(server.process.pid)
        (rate,) = run_load(server.url, None, work).rates
        assert (rate.answered, rate.errors, rate.output_tokens) == (1000, {}, 8000)
        assert resident_mib(server.process.pid) - before < 100
        assert server.figure("mllm:requests_waiting") == server.figure("mllm:connections_generating") == 0
