"""Modules that a process with a runtime imports before its first token, beside torch: its time goes there.

How many seconds that takes is `make bench`'s to compare.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

import yaml

from mllm_compile.cli import run
from tests.tiny_model import tiny_config

# Packages of others. To add one, measure a warm start (`make bench`) before and after.
IMPORTED = {
    *("numpy", "safetensors", "tokenizers", "yaml", "_yaml", "cython_runtime"),
    *("pydantic", "pydantic_core", "annotated_types", "typing_inspection"),
}

PROGRAM = """
import sys
import torch
with_torch = set(sys.modules)
from mllm_compile import Engine, SamplingParams
engine = Engine(sys.argv[1])
prompt = list(range(2, 34))
engine.generate([prompt] * 3, SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, top_k=20, logprobs=2))
engine.close()
import json
added = set(sys.modules) - with_torch
print(json.dumps([name for name in added if name.partition(".")[0] not in sys.stdlib_module_names]))
"""


def test_a_warm_start_imports_little_beside_torch_and_nothing_more_of_torch(eager_cache, tmp_path):
    path = tmp_path / "model.yaml"
    config = tiny_config(eager_cache, compile={"backend": "eager"})
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, check=True)
    packages: dict[str, list[str]] = {}
    for module in sorted(json.loads(done.stdout.splitlines()[-1])):
        packages.setdefault(module.partition(".")[0], []).append(module)
    assert packages.pop("mllm_compile")
    others = {name: modules for name, modules in packages.items() if name not in IMPORTED and not is_cython(name)}
    assert others == {}, "a warm start imports these too"


def is_cython(name: str) -> bool:
    """Of PyYAML's own extension: a module that Cython makes up, named by its version."""
    return name.startswith(("_cython_", "_sysconfigdata"))


def test_a_start_is_one_line_or_all_or_nothing(eager_cache, tmp_path, capsys):
    path = tmp_path / "model.yaml"
    config = tiny_config(eager_cache, compile={"backend": "eager"})
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))

    def said(*options: str) -> list[str]:
        assert run(["generate", str(path), "--chat", "--prompt", "x", "--max-tokens", "1", *options]) == 0
        return capsys.readouterr().err.splitlines()

    ready = r"ready in \d+\.\d s · CPU · float32 · [\d,]+ KV tokens"
    said()  # compiles where no other test has
    (line,) = said()
    assert re.fullmatch(ready, line)
    assert said("-q") == []
    lines = said("-v")
    assert re.fullmatch(ready, lines[-1])
    assert "auto values" in lines and any(line.startswith("CPU threads: ") for line in lines)
