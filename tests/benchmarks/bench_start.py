"""A start: weights from a file into packed tensors, and a fresh process to its first token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mllm_compile.runtime.weights.loader import allocate_weights, load_weights
from mllm_compile.runtime.weights.spec import WeightPart, WeightSpec
from tests.tiny_model import TINY

ROWS, COLUMNS, LAYERS = 1024, 1024, 8  # 3 parts a layer, 2 bytes: 48 MiB


@pytest.fixture
def weight_file(tmp_path: Path) -> Path:
    parts = {f"layer{i}.{part}": torch.randn(ROWS, COLUMNS).bfloat16() for i in range(LAYERS) for part in "qkv"}
    save_file(parts, tmp_path / "model.safetensors")
    return tmp_path


def packed_spec(layer: int) -> WeightSpec:
    parts = tuple(
        WeightPart(tensor=f"layer{layer}.{part}", file="model.safetensors", start=index * ROWS, shape=(ROWS, COLUMNS))
        for index, part in enumerate("qkv")
    )
    return WeightSpec(f"layer{layer}.qkv", (3 * ROWS, COLUMNS), torch.bfloat16, parts)


def test_loading_48_mib_of_packed_weights(measure, weight_file):
    specs = [packed_spec(layer) for layer in range(LAYERS)]
    weights = allocate_weights(specs, "cpu")
    measure(lambda: load_weights(specs, weights, weight_file), rounds=20, reference="copy")
    assert all(weight.abs().sum() > 0 for weight in weights.values())


WARM_START = """
import sys
from mllm_compile import Engine, SamplingParams
with Engine(sys.argv[1]) as engine:
    (output,) = engine.generate([[5] * 32], SamplingParams(max_tokens=1, ignore_eos=True), progress=False)
    assert len(output.token_ids) == 1
"""


def test_warm_start_of_a_process(measure, eager_cache, tmp_path):
    config = tmp_path / "tiny.yaml"
    config.write_text(
        f"model: {{path: {TINY}, dtype: float32}}\ncompile: {{backend: eager}}\ncache: {{dir: {eager_cache}}}\n"
        "runtime: {device: cpu, max_model_len: 512, max_running_requests: 8}\n"
    )
    command = [sys.executable, "-c", WARM_START, str(config)]
    measure(lambda: subprocess.run(command, check=True), rounds=3, reference="process")
