"""Two engines of the embedded model behind one port, on a CPU: they answer as an engine by itself does."""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.server.kill_speed import children, engine_of
from mllm_compile import Engine, SamplingParams
from mllm_compile.server.backend.spare import WAITS
from tests.server.harness import eventually, running

PROMPTS = ["Return a new list containing", 'The "for" statement is used to iterate over', "é ☕"]


def test_answers_of_both_are_an_engines_own(tiny_yaml, tmp_path):
    with Engine(str(tiny_yaml)) as engine:
        expected = [engine.generate(one, SamplingParams(temperature=0, max_tokens=40))[0].text for one in PROMPTS]
    command = [sys.executable, "-m", "mllm_compile", "serve", str(tiny_yaml), "--replicas", "2", "--port", "0"]
    with running(command, tmp_path / "log") as server:
        eventually(lambda: "2 engines" in server.said, "both engines")

        def ask(number: int) -> str:
            answer = server.complete(prompt=PROMPTS[number % len(PROMPTS)], max_tokens=40, temperature=0)
            return answer.json["choices"][0]["text"]

        with ThreadPoolExecutor(6) as clients:
            assert list(clients.map(ask, range(12))) == [expected[number % len(PROMPTS)] for number in range(12)]
        eventually(lambda: all(server.figure(f'mllm:steps_total{{engine="{n}"}}') > 0 for n in (0, 1)), "steps of both")


@pytest.mark.slow
def test_a_replica_that_is_killed_goes_on_in_the_spare_process(tiny_yaml, tmp_path):
    command = [sys.executable, "-m", "mllm_compile", "serve", str(tiny_yaml), "--replicas", "2", "--port", "0"]
    with running(command, tmp_path / "log") as server:

        def ask() -> str:
            return server.complete(prompt=PROMPTS[0], max_tokens=40, temperature=0).json["choices"][0]["text"]

        expected = ask()
        eventually(lambda: any(name == WAITS for _, name in children(server.process.pid)), "the spare process")
        (spare,) = (pid for pid, name in children(server.process.pid) if name == WAITS)
        os.kill(engine_of(server.process.pid), signal.SIGKILL)
        lost = [f'mllm:engine_restarts_total{{engine="{number}"}}' for number in (0, 1)]
        eventually(lambda: sum(map(server.figure, lost)) == 1, "the loss of one")
        eventually(lambda: set(server.get("/ready").json["engines"].values()) == {"running"}, "both engines")
        assert [name for pid, name in children(server.process.pid) if pid == spare] == ["mllm-engine"]
        with ThreadPoolExecutor(6) as clients:
            assert list(clients.map(lambda _: ask(), range(12))) == [expected] * 12
