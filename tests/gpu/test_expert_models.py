"""Whole mixtures of experts in bfloat16: against float32, and with captured graphs bit for bit.

All with their pieces as traced, whose experts are kernels of ours by the op, and three through Inductor; each model is
compiled and started once. `-n 4` runs four side by side: they take little memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.engine.start.assemble import assemble
from mllm_compile.process.timeline import Timeline
from mllm_compile.runtime.graph_mode import GraphKind
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.store.artifact import open_artifact
from tests.gpu.graph_cases import decode_batch, fill_pages, graphs_of, mixed_batch
from tests.gpu.test_architectures import attention_of
from tests.gpu.test_cuda_graphs import uncaptured
from tests.gpu.test_experts import scores_of
from tests.gpu.test_gpt_oss import scores_of_answer
from tests.gpu.test_served_models import random_ids, reference, reference_scores
from tests.model.models_record import note_on_gpu
from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN, save_tiny_model, tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

MODELS = (
    *("qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3", "glm4_moe", "qwen2_moe", "olmoe", "phimoe", "minimax_m2"),
    *("ernie4_5_moe", "deepseek_v2", "granitemoe", "dbrx", "jetmoe", "longcat_flash"),
)
BY_INDUCTOR = ("qwen3_moe", "gpt_oss", "mixtral")
# Where a config has them: experts that the kernels take, more than are chosen.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
}
OWN_SIZES = ("dbrx", "jetmoe", "longcat_flash")  # whose sizes follow from each other otherwise
LONGEST, NEW, REQUESTS, PAGES = 512, 32, 40, 240
POSITIONS = dict.fromkeys(("max_position_embeddings", "max_seq_len"), LONGEST)
DECODE_REQUESTS, PIECEWISE_TOKENS, MOST_TOKENS = (1, 8, REQUESTS), (64, 256), 512
MARGIN = 1.25


def config_of(folder: Path, backend: str) -> dict[str, Any]:
    return {
        "model": {"path": str(folder / "model"), "dtype": "bfloat16"},
        "compile": {"backend": backend},
        "cache": {"dir": str(folder / "cache")},
        "cudagraph": {
            "decode_requests": list(DECODE_REQUESTS),
            "piecewise_tokens": list(PIECEWISE_TOKENS),
            "mixed_tokens": [],
        },
        "runtime": {
            "device": "cuda",
            "max_model_len": LONGEST,
            "max_running_requests": REQUESTS,
            "max_num_batched_tokens": MOST_TOKENS,
            "page_size": 64,
        },
    }


def save(name: str, folder: Path) -> None:
    known = tiny_config(name)
    sizes = POSITIONS | ({} if name in OWN_SIZES else SIZES)
    sizes = {key: size for key, size in sizes.items() if hasattr(known, key)}
    save_tiny_model(tiny_config(name, **sizes), folder / "model")


CASES = [*((name, "eager") for name in MODELS), *((name, "inductor") for name in BY_INDUCTOR)]


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_a_model_is_as_near_to_float32_as_transformers_is_and_graphs_change_nothing(tmp_path, name, backend):
    """On 40 prompts in one batch: of few scores the error is chance, as rounding sends tokens to other experts."""
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this Transformers has no {name}")
    save(name, tmp_path)
    parts: Any = assemble(EngineConfig.from_dict(config_of(tmp_path, backend)), Timeline(), num_pages=PAGES)
    artifact = open_artifact(parts.folder)
    with Engine.from_parts(parts) as engine:
        check_graphs(parts.step_runner._runner)
        prompts = [random_ids(3 + 3 * number, FIRST_SPECIAL_TOKEN, number) for number in range(REQUESTS)]
        asked = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=0, prompt_logprobs=0)
        outputs = engine.generate(prompts, asked)
    texts = [ids + list(output.token_ids) for ids, output in zip(prompts, outputs, strict=True)]
    exact, rounded = (
        [reference_scores(model, ids) for ids in texts]
        for model in (reference(tmp_path / "model", dtype) for dtype in (torch.float32, torch.bfloat16))
    )
    of_both = []
    for what, ours, part in (
        ("prompts", [scores_of(one, ids) for one, ids in zip(outputs, prompts, strict=True)], slice(None, -NEW)),
        ("answers", [scores_of_answer(one) for one in outputs], slice(-NEW, None)),
    ):
        want, theirs = (torch.cat([scores[part] for scores in of_model]) for of_model in (exact, rounded))
        error, limit = ((one - want).abs().mean().item() for one in (torch.cat(ours), theirs))
        print(f"{name} {backend}, {what}: off by {error:.5f}, Transformers in bfloat16 by {limit:.5f}")
        assert error <= MARGIN * limit + 1e-3
        of_both.append((error, limit))
    note_on_gpu(name, "" if backend == "eager" else "by Inductor", attention_of(artifact.program), *of_both)


@torch.inference_mode()
def check_graphs(runner: ModelRunner) -> None:
    """Before the engine has work. Pages hold anything; captured and other steps read the same."""
    graphs = graphs_of(runner)
    fill_pages(runner)
    for seed, num_requests in enumerate((1, 5, 8, 33)):
        batch = decode_batch(runner, num_requests, seed)
        descriptor = graphs.dispatcher.find(GraphKind.DECODE, num_requests)
        assert descriptor is not None
        captured = graphs.run(batch).next_token_logits.clone()
        assert captured.isfinite().all()
        assert torch.equal(captured, uncaptured(runner, batch, descriptor)[:num_requests]), f"{num_requests} decodes"
    for seed, num_tokens in enumerate((37, 200)):
        batch = mixed_batch(runner, num_tokens, seed, longest_prefix=100)
        descriptor = next(graphs.dispatcher.candidates(num_tokens))
        assert descriptor.kind is GraphKind.PIECEWISE
        captured = runner.forward(batch).next_token_logits.clone()
        assert captured.isfinite().all()
        assert torch.equal(captured, uncaptured(runner, batch, descriptor)), f"{num_tokens} tokens"
