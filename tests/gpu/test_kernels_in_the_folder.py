"""A GPU machine without nvcc, and without prebuilt kernels of FlashInfer, serves from a runtime that holds them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mllm_compile import EngineConfig
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.compile_options import CompileOptions
from mllm_compile.errors import ArtifactError
from mllm_compile.store.artifact import hash_files, open_artifact, read_manifest, write_manifest
from tests.gpu.small_shape import SHAPE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

# No nvcc on PATH, nothing built before, FlashInfer's package of prebuilt kernels hidden, and building forbidden.
SERVE = """
import json, os, sys
sys.modules["flashinfer_jit_cache"] = None
os.environ["FLASHINFER_DISABLE_JIT"] = "1"
from mllm_compile import Engine, SamplingParams
from mllm_compile.errors import MllmError
try:
    with Engine(sys.argv[1]) as engine:
        greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
        sampled = SamplingParams(max_tokens=4, temperature=1, top_k=20, top_p=0.9, detokenize=False)
        prompts = [list(range(5, 5 + count)) for count in (1, 17, 700)]
        answers = engine.generate(prompts, greedy)
        engine.generate(prompts, sampled)
        heavy = [name for name in ("torch._inductor", "torch._dynamo", "transformers") if name in sys.modules]
        print(json.dumps({"tokens": [answer.outputs[0].token_ids for answer in answers], "heavy": heavy}))
except MllmError as error:
    print(json.dumps({"error": str(error)}))
"""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runtime")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(SHAPE))
    config = EngineConfig.from_dict(
        {
            "model": {"path": str(folder / "model"), "load_format": "dummy"},
            "runtime": {"device": "cuda", "max_model_len": 1024, "max_running_requests": 8},
            "cudagraph": {"mode": "none"},
            "cache": {"dir": str(folder / "cache")},
        }
    )
    return load_or_compile(config, None, CompileOptions(output=folder / "runtime")).folder


def serve(folder: Path, tmp_path: Path) -> dict:
    environment = os.environ | {"PATH": "/usr/bin:/bin", "FLASHINFER_WORKSPACE_BASE": str(tmp_path / "workspace")}
    for name in ("CUDA_HOME", "CUDA_PATH"):
        environment.pop(name, None)
    command = [sys.executable, "-c", SERVE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_it_serves_with_what_is_in_the_folder_alone(runtime, tmp_path):
    kernels = {path.parent.name for path in runtime.glob("kernels/*/*.so")}
    assert any(name.startswith("batch_prefill") for name in kernels)
    assert "sampling" in kernels
    said = serve(runtime, tmp_path)
    assert "error" not in said, said
    assert [len(tokens) for tokens in said["tokens"]] == [8, 8, 8]
    assert said["heavy"] == []


def test_without_kernels_it_says_what_to_install(runtime, tmp_path):
    shutil.copytree(runtime, tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare" / "kernels")
    manifest = read_manifest(tmp_path / "bare")
    write_manifest(tmp_path / "bare", replace(manifest, files=hash_files(tmp_path / "bare")))
    assert "flashinfer-jit-cache" in serve(tmp_path / "bare", tmp_path)["error"]


def test_a_flipped_byte_in_a_kernel_is_refused_before_it_is_loaded(runtime, tmp_path):
    path = next(runtime.glob("kernels/*/*.so"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    try:
        with pytest.raises(ArtifactError, match="is not what was compiled"):
            open_artifact(runtime)
    finally:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
