"""How fast a process that finds a runtime is ready, and what it leaves unimported until it has answered."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import yaml

from tests.tiny_model import tiny_config

FACTOR, SLACK_S = 1.5, 1.0
ATTEMPTS = 3  # the machine may be busy with something else

PROGRAM = """
import sys, time
start = time.perf_counter()
import torch
torch_s = time.perf_counter() - start
from mllm_compile import Engine, SamplingParams
engine = Engine(sys.argv[1])
prompt = list(range(2, 34))
engine.generate(prompt, SamplingParams(max_tokens=1, temperature=0))
first_token_s = time.perf_counter() - start
engine.generate([prompt] * 3, SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, top_k=20, logprobs=2))
engine.close()
import json
heavy = ("torch._dynamo", "torch._inductor", "transformers", "sympy", "triton", "huggingface_hub", "rich")
print(json.dumps({"torch": torch_s, "first token": first_token_s, "heavy": [m for m in heavy if m in sys.modules]}))
"""


def start(config_path: Path) -> dict:
    command = [sys.executable, "-c", PROGRAM, str(config_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_a_warm_start_takes_little_more_than_importing_torch_and_imports_no_compiler(eager_cache, tmp_path):
    path = tmp_path / "model.yaml"
    config = tiny_config(eager_cache, compile={"backend": "eager"})
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    for attempt in range(ATTEMPTS):
        found = start(path)
        assert found["heavy"] == []
        limit_s = FACTOR * found["torch"] + SLACK_S
        if found["first token"] <= limit_s:
            return
        print(f"attempt {attempt}: {found['first token']:.2f} s, limit {limit_s:.2f} s")
    raise AssertionError(f"first token after {found['first token']:.2f} s; importing torch took {found['torch']:.2f} s")
