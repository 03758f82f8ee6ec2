"""How servers and their engines end, and come back."""

from __future__ import annotations

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mllm_compile.errors import ConfigError
from mllm_compile.server.options import ServeOptions
from mllm_compile.server.serve import run_server
from tests.hang_guard import HANG_S
from tests.server.harness import Answer, Server, eventually, fake_server

SLOW = {"delay_s": 0.02, "limits": {"max_model_len": 4096, "num_pages": 4096}}
LONG = {"prompt": "def", "max_tokens": 3000, "ignore_eos": True, "stream": True}


def stream(server: Server, tokens: int) -> Answer:
    return server.post("/v1/completions", {**LONG, "max_tokens": tokens})


def begin(server: Server, threads: ThreadPoolExecutor, tokens: int) -> Any:
    """A stream that runs."""
    future = threads.submit(stream, server, tokens)
    eventually(lambda: server.figure("mllm:requests_running") == 1)
    return future


def is_gone(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True


@pytest.fixture
def gate(tmp_path) -> Path:
    """A file; waits end when it is removed."""
    path = tmp_path / "gate"
    path.touch()
    return path


def test_sigterm_lets_running_requests_end_and_takes_no_more(gate):
    held = {"MLLM_FAKE_STUCK": str(gate)}
    with fake_server(settings=SLOW, environment=held) as server, ThreadPoolExecutor() as threads:
        (engine,) = server.engine_pids()
        running = threads.submit(stream, server, 4)
        eventually(lambda: server.figure("mllm:connections_generating") == 1)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.get("/ready").status == 503)
        assert server.get("/ready").json["state"] == "draining"
        refused = server.complete()
        assert (refused.status, refused.error["code"]) == (503, "shutting_down")
        assert "retry-after" in refused.headers
        gate.unlink()
        events = running.result().events
        assert events[-1] is None
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait() == 0
        assert is_gone(engine)


def test_requests_that_take_too_long_for_a_shutdown_are_told():
    with fake_server({"shutdown_timeout_s": 0.5}, SLOW) as server, ThreadPoolExecutor() as threads:
        running = begin(server, threads, 3000)
        assert server.end() == 0
        events = running.result().events
        assert events[-2]["error"]["code"] == "shutting_down"


def test_requests_that_wait_for_an_engine_are_told_of_the_shutdown(tmp_path):
    chat = {"messages": [{"role": "user", "content": "x"}]}
    asked = {"/tokenize": {"prompt": "def"}, "/v1/completions": {"prompt": "def"}, "/v1/chat/completions": chat}
    gate = tmp_path / "gate"
    gate.touch()
    options = {"shutdown_timeout_s": 0.2}
    held = {"MLLM_FAKE_SLOW_START": str(gate)}
    with fake_server(options, environment=held, waits=False) as server, ThreadPoolExecutor() as threads:
        waiting = [threads.submit(server.post, path, body) for path, body in asked.items()]
        eventually(lambda: server.figure("mllm:requests_waiting") == 2)
        eventually(lambda: server.get("/ready").json.get("stage") == "fake")
        assert server.end() == 0
        for answer in (one.result() for one in waiting):
            assert (answer.status, answer.error["code"]) == (503, "shutting_down")
            assert "retry-after" in answer.headers
        assert "Traceback" not in server.said


def test_a_request_that_waits_for_an_engine_that_wakes_is_told_too(tmp_path):
    blocked = tmp_path / "blocked"
    options = {"shutdown_timeout_s": 0.2, "sleep_after_s": 0.3}
    environment = {"MLLM_FAKE_SLOW_START": str(blocked)}
    with fake_server(options, environment=environment) as server, ThreadPoolExecutor() as threads:
        blocked.touch()
        eventually(lambda: server.get("/ready").json["state"] == "asleep")
        waiting = threads.submit(server.complete)
        eventually(lambda: server.get("/ready").json["state"] == "starting")
        assert server.end() == 0
        assert (waiting.result().status, waiting.result().error["code"]) == (503, "shutting_down")
        assert "Trying again" not in server.said and "Traceback" not in server.said


def test_a_body_that_still_comes_is_told_of_the_shutdown():
    with fake_server({"shutdown_timeout_s": 0.2}) as server:
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")
        eventually(lambda: server.get("/ready").status == 200)  # a later connection was served: this one is read
        server.process.send_signal(signal.SIGTERM)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert server.process.wait() == 0
        connection.close()
        assert answer.startswith(b"HTTP/1.1 503") and b"shutting_down" in answer
        assert "Traceback" not in server.said


def test_a_second_signal_ends_at_once():
    with fake_server(settings=SLOW) as server, ThreadPoolExecutor() as threads:
        (engine,) = server.engine_pids()
        running = begin(server, threads, 3000)
        server.process.send_signal(signal.SIGINT)
        eventually(lambda: "shutting down" in server.said)
        assert server.end(signal.SIGINT) == 0
        assert running.result().events[-2]["error"]["code"] == "shutting_down"
        assert is_gone(engine)


def test_a_killed_engine_is_told_to_every_client_and_is_back():
    with fake_server(settings=SLOW) as server, ThreadPoolExecutor() as threads:
        (engine,) = server.engine_pids()
        streamed = begin(server, threads, 3000)
        whole = threads.submit(server.post, "/v1/completions", {**LONG, "stream": False})
        eventually(lambda: server.figure("mllm:requests_running") == 2)
        os.kill(engine, signal.SIGKILL)
        assert streamed.result().events[-2]["error"]["code"] == "engine_lost"
        assert (whole.result().status, whole.result().error["code"]) == (503, "engine_lost")
        assert server.complete().status == 200  # waits for the next engine
        assert server.engine_pids() != [engine]
        assert server.get("/health").json == {"state": "ready"}
        assert server.figure("mllm:engine_restarts_total") == 1


def test_a_stuck_step_is_seen_and_the_engine_made_anew(tmp_path):
    stuck = tmp_path / "stuck"
    environment = {"MLLM_FAKE_STUCK": str(stuck), "MLLM_FAKE_LEAPS": str(stuck)}
    with (
        fake_server({"stuck_after_s": HANG_S}, SLOW, environment) as server,
        ThreadPoolExecutor() as threads,
    ):
        running = begin(server, threads, 3000)
        stuck.touch()
        eventually(lambda: server.get("/health").status == 503)
        assert server.get("/health").json["state"] in ("stuck", "starting")
        assert running.result().events[-2]["error"]["code"] == "engine_lost"
        stuck.unlink()
        eventually(server.is_ready)
        assert server.complete().status == 200


def test_an_idle_engine_sleeps_and_a_request_wakes_it():
    with fake_server({"sleep_after_s": 0.5}) as server:
        eventually(lambda: not server.engine_pids())
        assert server.get("/ready").json == {"state": "asleep"}
        assert server.get("/health").status == 200
        assert [model["id"] for model in server.get("/v1/models").json["data"]] == ["fake"]
        assert server.complete().status == 200, "of another engine"


def test_requests_wait_for_an_engine_that_starts(gate):
    with (
        fake_server(environment={"MLLM_FAKE_SLOW_START": str(gate)}, waits=False) as server,
        ThreadPoolExecutor() as threads,
    ):
        starting = server.get("/ready")
        assert (starting.status, starting.json["state"]) == (503, "starting")
        assert server.get("/health").status == 200
        waiting = threads.submit(server.complete)
        eventually(lambda: server.figure("mllm:requests_waiting") == 1)
        gate.unlink()
        assert waiting.result().status == 200


def test_a_server_that_starts_ends_at_a_signal(gate):
    with fake_server(environment={"MLLM_FAKE_SLOW_START": str(gate)}, waits=False) as server:
        engines: list[int] = []  # as first seen: a process that replaces its program has no command for a moment
        eventually(lambda: engines.extend(server.engine_pids()) or engines)
        assert server.end() == 0
        assert is_gone(engines[0])


def test_a_client_that_leaves_before_the_engine_is_ready_is_forgotten(gate):
    with fake_server(environment={"MLLM_FAKE_SLOW_START": str(gate)}, waits=False) as server:
        connection = server.open("/v1/completions", LONG)
        eventually(lambda: server.figure("mllm:requests_waiting") == 1)
        connection.close()
        eventually(lambda: server.figure("mllm:requests_waiting") == 0)


def test_an_engine_that_cannot_start_ends_the_server_with_its_reason():
    with fake_server(settings={"fails": True}, waits=False) as server:
        assert server.process.wait() == 2
        assert "error: the fake engine does not start" in server.said
        assert "Traceback" not in server.said


def test_an_engine_does_not_outlive_a_front_that_is_killed():
    with fake_server() as server:
        (engine,) = server.engine_pids()
        server.process.kill()
        eventually(lambda: is_gone(engine))


def test_a_port_in_use_is_said():
    with socket.create_server(("127.0.0.1", 0)) as other:
        options = ServeOptions(model="m", port=other.getsockname()[1])
        with pytest.raises(ConfigError, match=r"cannot be listened at .*Address already in use"):
            run_server(options)


def test_a_server_leaves_no_file(tmp_path):
    with fake_server(environment={"TMPDIR": str(tmp_path)}) as server:
        assert server.complete().status == 200
        assert server.end() == 0
    assert not list(tmp_path.iterdir())
