"""A runtime with adapters by clusters, from compiling to serving: its kernels are written, opened and loaded.

The kernels need a Hopper GPU: here their ops are stand-ins, as in test_streamed_runtime.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mllm_compile import open_model
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.schema import EngineConfig
from mllm_compile.kernels import cuda
from mllm_compile.passes.base import GraphPass
from mllm_compile.passes.fuse_gated_linear import FuseGatedLinear
from mllm_compile.passes.launch_lora import LaunchLora
from mllm_compile.passes.launch_lora_clusters import LaunchLoraClusters
from mllm_compile.passes.stream_linears import StreamLinears
from mllm_compile.runtime.program import link as linking
from mllm_compile.runtime.program.spec import Program
from tests.lora_factors import random_factors
from tests.model.tiny_configs import save_tiny_model, tiny_config
from tests.passes.support import stand_ins
from tests.runtime.runner_cases import Loop

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 512, "max_position_embeddings": 512}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
LAYERS = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
PASSES = StreamLinears, FuseGatedLinear, LaunchLora, LaunchLoraClusters


@pytest.mark.slow
def test_prompts_with_adapters_have_the_tokens_that_they_have_without_the_kernels(monkeypatch, tmp_path):
    loads: list[set[str]] = []
    monkeypatch.setattr(cuda, "compile_cuda", lambda source, name, architecture: name.encode())
    monkeypatch.setattr(linking, "load_kernels", lambda kernels, *_: loads.append(set(kernels)))
    save_tiny_model(tiny_config("qwen3", **SIZES, **LAYERS), tmp_path / "model")
    with stand_ins.streamed_ops_on_cpu(), stand_ins.stand_in_ops(stand_ins.LORA):
        program, ours = answers(tmp_path, monkeypatch, *PASSES)
        assert Program.from_json(program.to_json()) == program
        assert program.lora is not None
        found = {kernel.name for kernel in program.lora.program.kernels["lora_clusters"]}
        norms = {f"norm_in_clusters_512_rank16_rows{rows}" for rows in (32, 48)}
        # The last layer's rows are gathered, and their slots. A norm reads these early: gates and ups have an A apart.
        shrinks = {f"shrink_in_clusters_{shape}" for shape in ("16x512", "32x512", "48x512", "16x1024")}
        assert found == norms | shrinks
        assert any("lora_clusters" in kernels for kernels in loads)
        assert ours == answers(tmp_path, monkeypatch)[1]


def answers(folder: Path, patch: pytest.MonkeyPatch, *passes: type[GraphPass]) -> tuple[Program, list[list[int]]]:
    """The program that is compiled with these passes, and the tokens behind prompts with two adapters and none."""
    stand_ins.only_kernel_passes(patch, *passes)
    sections = {
        "model": {"path": str(folder / "model"), "dtype": "bfloat16"},
        "compile": {"backend": "eager"},
        "runtime": {"device": "cpu", "max_model_len": 512},
        "lora": {"max_adapters": 2, "max_rank": 16},
        "cache": {"dir": str(folder / f"cache_{len(passes)}")},
    }
    config = EngineConfig.from_dict(sections)
    program = load_or_compile(config).artifact.program
    runner = open_model(config).runner
    runner.initialize()
    lora = runner.model.lora
    assert lora is not None
    for slot in range(2):
        lora.pool.write(slot, random_factors(lora.pool, slot, 16))
    loop = Loop(runner)
    requests = [loop.add(list(range(10, 10 + length)), max_tokens=6) for length in (240, 3, 80)]
    for request, slot in zip(requests, (1, -1, 0), strict=True):
        request.adapter_slot = slot
    with runner.on_device(), torch.inference_mode():
        loop.run()
    runner.shutdown()
    return program, [request.output_token_ids for request in requests]
