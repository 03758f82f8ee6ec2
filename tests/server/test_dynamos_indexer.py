"""Dynamo's own indexer before two servers of ours, where its package is installed.

`pip install --target FOLDER ai-dynamo-runtime`, with FOLDER on PYTHONPATH.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.hang_guard import HANG_S
from tests.server.harness import Server, eventually, running


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def needs(module: str) -> pytest.MarkDecorator:
    try:
        is_there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        is_there = False
    return pytest.mark.skipif(not is_there, reason=f"needs {module}")


@contextmanager
def router(command: list[str], port: int, log: Path) -> Iterator[Server]:
    """A program that listens at a port, until the block ends."""
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", *command], stdout=output, stderr=output)
    found = Server(process, log)
    found.port = port
    try:

        def answers() -> bool:
            assert process.poll() is None, found.said[-2000:]
            try:
                return found.get("/health").status == 200
            except OSError:
                return False

        eventually(answers, "the router")
        yield found
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(HANG_S)


@needs("dynamo.indexer")
@needs("zmq")
def test_dynamos_indexer_knows_which_server_has_a_prompt(tiny_yaml, tmp_path):
    with ExitStack() as stack:
        servers, sources = [], []
        for number in range(2):
            sources.append(f"{number + 1}=tcp://127.0.0.1:{(port := free_port())}")
            events = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}", "topic": f"kv@{number}@tiny"}
            command = [sys.executable, "-m", "mllm_compile", "serve", str(tiny_yaml), "--port", "0"]
            command += ["--kv-events-config", json.dumps(events)]
            servers.append(stack.enter_context(running(command, tmp_path / f"log{number}")))
        page = servers[0].get("/server_info").json["engine"]["config"]["runtime"]["page_size"]
        port = free_port()
        command = ["dynamo.indexer", "--block-size", str(page), "--port", str(port), "--model-name", "tiny"]
        index = stack.enter_context(router([*command, "--workers", ",".join(sources)], port, tmp_path / "log"))

        def scores(prompt: list[int]) -> dict[str, dict[str, int]]:
            body = {"token_ids": prompt, "model_name": "tiny"}
            return index.post("/query", body, headers={"content-type": "application/json"}).json["scores"]

        firsts = itertools.count(3)
        for number, server in enumerate(servers):

            def is_known(number=number, server=server) -> bool:
                # A subscriber that is not connected yet hears nothing: another prompt follows until it is.
                first = next(firsts) * 31
                prompt = [(first + place) % 150 for place in range(97)]
                server.complete(prompt=prompt, max_tokens=1)
                return scores(prompt) == {str(number + 1): {"0": len(prompt) // page * page}}

            eventually(is_known, "the prompt's blocks")
