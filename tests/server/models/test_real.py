"""Two engines of the embedded model behind one server, on a CPU: they answer as an engine by itself does."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.server.kill_speed import children, engine_of
from mllm_compile import Engine, SamplingParams
from mllm_compile.server.backend.spare import WAITS
from tests.server.harness import Server, eventually, running
from tests.server.models.servers import states, switches

pytestmark = pytest.mark.slow

PROMPTS = ["Return a new list containing", 'The "for" statement is used to iterate over', "é ☕"]


@pytest.fixture(scope="module")
def server(tiny_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Each is parked while the other runs."""
    command = [sys.executable, "-m", "mllm_compile", "serve", f"a={tiny_yaml}", f"b={tiny_yaml}", "--port", "0"]
    command += ["--max-awake", "1", "--turn", "0.2s"]
    with running(command, tmp_path_factory.mktemp("log") / "log") as server:
        yield server


def test_answers_are_an_engines_own_across_many_turns(server, tiny_yaml):
    with Engine(str(tiny_yaml)) as engine:
        expected = [engine.generate(one, SamplingParams(temperature=0, max_tokens=120))[0].text for one in PROMPTS]

    def ask(number: int) -> str:
        prompt = PROMPTS[number % len(PROMPTS)]
        answer = server.complete(model="ab"[number % 2], prompt=prompt, max_tokens=120, temperature=0)
        return answer.json["choices"][0]["text"]

    with ThreadPoolExecutor(6) as clients:
        assert list(clients.map(ask, range(24))) == [expected[number % len(PROMPTS)] for number in range(24)]
    assert switches(server, "a") >= 1 and switches(server, "b") >= 1


def test_a_grammar_holds_across_turns(server):
    def ask(model: str) -> str:
        answer = server.complete(model=model, max_tokens=60, temperature=0, structured_outputs={"regex": "(ab|cd){20}"})
        return answer.json["choices"][0]["text"]

    with ThreadPoolExecutor(4) as clients:
        texts = list(clients.map(ask, "abab"))
    assert all(len(text) == 40 and not text.replace("ab", "").replace("cd", "") for text in texts)
    assert set(states(server).values()) == {"running", "parked"}


def test_a_model_whose_engine_is_killed_goes_on_in_the_spare_process(server):
    def ask(model: str) -> str:
        return server.complete(model=model, prompt=PROMPTS[0], max_tokens=40, temperature=0).json["choices"][0]["text"]

    expected = ask("a")
    assert ask("b") == expected
    eventually(lambda: any(name == WAITS for _, name in children(server.process.pid)), "the spare process")
    (spare,) = (pid for pid, name in children(server.process.pid) if name == WAITS)
    os.kill(engine_of(server.process.pid), signal.SIGKILL)
    lost = [f'mllm:engine_restarts_total{{model="{name}"}}' for name in "ab"]
    eventually(lambda: sum(map(server.figure, lost)) == 1, "the loss of one")
    assert [ask("a"), ask("b")] == [expected, expected]
    assert [name for pid, name in children(server.process.pid) if pid == spare] == ["mllm-engine"]
