"""Dynamo's own indexer before two servers of ours, where its package is installed.

`pip install --target FOLDER ai-dynamo-runtime`, with FOLDER on PYTHONPATH.
"""

from __future__ import annotations

import importlib.util
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
    prompts = [list(range(3, 100)), list(range(100, 3, -1))]
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
            return index.post("/query", {"token_ids": prompt, "model_name": "tiny"}).json["scores"]

        for number, (server, prompt) in enumerate(zip(servers, prompts, strict=True)):
            expected = {str(number + 1): {"0": len(prompt) // page * page}}

            def is_known(server=server, prompt=prompt, expected=expected) -> bool:
                # A subscriber that is not connected yet hears nothing: other prompts follow until it does.
                server.complete(prompt=prompt, max_tokens=1)
                return scores(prompt) == expected

            eventually(is_known, "the prompt's blocks")
