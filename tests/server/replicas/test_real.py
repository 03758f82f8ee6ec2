"""Two engines of the embedded model behind one port, on a CPU: they answer as an engine by itself does."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from mllm_compile import Engine, SamplingParams
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
