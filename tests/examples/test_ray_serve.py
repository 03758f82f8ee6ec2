"""examples/ray_serve.py with two replicas on a CPU: prompts stick, and a killed server loses no whole answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.hang_guard import HANG_S, until
from tests.tiny_model import tiny_config

EXAMPLES = Path(__file__).parents[2] / "examples"
PORT = 8437


def ask(prompt: str, **fields: Any) -> dict[str, Any]:
    body = json.dumps({"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/completions", body)
    with urllib.request.urlopen(request, timeout=HANG_S) as answer:
        return json.load(answer)["usage"]


def servers(config: Path) -> list[int]:
    """Processes with a replica's server."""
    listed = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in listed.splitlines() if f"-m mllm_compile serve {config} --port 0" in line]


@pytest.mark.slow
def test_prompts_stick_to_a_replica_and_a_killed_one_loses_no_whole_answer(eager_cache, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent)]))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import ray_serve

    config = tmp_path / "tiny.yaml"
    sections = tiny_config(eager_cache, compile={"backend": "eager"}).model_dump(mode="json", exclude_unset=True)
    config.write_text(yaml.safe_dump(sections))
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    try:
        ray_serve.start(str(config), 2, PORT, num_cpus=0.5)
        for name in ("Alpha ", "Beta ", "Gamma ", "Delta "):
            cached = [ask(name * 30 + str(i))["prompt_tokens_details"]["cached_tokens"] for i in range(4)]
            assert all(cached[1:]), "the first one's KV is found again"
        with ThreadPoolExecutor(8) as threads:
            answers = [threads.submit(ask, f"Word {i} " * 10, max_tokens=60) for i in range(40)]
            until(lambda: any(answer.done() for answer in answers))
            os.kill(servers(config)[0], signal.SIGKILL)
            assert [answer.result()["completion_tokens"] for answer in answers] == [60] * 40
        until(lambda: len(servers(config)) >= 2, "another replica is there")
    finally:
        ray_serve.serve.shutdown()
        ray.shutdown()
        sys.modules.pop("ray_serve", None)
