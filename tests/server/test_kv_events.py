"""A server's KV events: published by the front, of what the engine's process caches."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from benchmarks.server.kill_speed import engine_of
from tests.hang_guard import HANG_S, until
from tests.kv_events.readers import LlmD
from tests.server.harness import running

zmq = pytest.importorskip("zmq")
PROMPT = list(range(3, 100))


def test_routers_hear_what_a_server_caches_and_that_its_engine_is_lost(tiny_yaml, tmp_path_factory):
    folder = tmp_path_factory.mktemp("e")
    events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{folder}/p", "topic": "kv@pod@tiny"}
    command = [sys.executable, "-m", "mllm_compile", "serve", str(tiny_yaml), "--port", "0"]
    command += ["--kv-events-config", json.dumps(events)]
    context, router = zmq.Context(), LlmD("kv@pod@tiny")
    socket = context.socket(zmq.SUB)
    socket.subscribe(b"kv@")
    socket.connect(events["endpoint"])
    try:
        with running(command, folder / "log") as server:
            server.complete(prompt=PROMPT)
            assert socket.poll(HANG_S * 1000)
            router.read(socket.recv_multipart())
            longest = max(router.paths.values(), key=len)
            size = len(longest[0][0])
            assert [token for page, _ in longest for token in page] == PROMPT[: len(PROMPT) // size * size]
            os.kill(engine_of(server.process.pid), signal.SIGKILL)
            until(lambda: socket.poll(100), "the end of its blocks")
            router.read(socket.recv_multipart())
            assert not router.paths
    finally:
        context.destroy(linger=0)
