"""Whole mixtures of experts through Inductor, in bfloat16: against float32, and with captured graphs bit for bit.

Processes of their own compile them, a few at once, beside the tests: these start warm, each with one engine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.engine.assemble import assemble
from mllm_compile.process.timeline import Timeline
from mllm_compile.runtime.graph_mode import CUDAGraphMode
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.store.artifact import Artifact, open_artifact
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
# Where a config has them: experts that the kernels take, of which more are left than are chosen.
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
COMPILED_AT_ONCE = 4
MARGIN = 1.25


def config_of(folder: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(folder / "model"), "dtype": "bfloat16"},
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
    (folder / "config.yaml").write_text(json.dumps(config_of(folder)))  # JSON is YAML


def compile_in_its_own_process(folder: Path) -> None:
    command = [sys.executable, "-m", "mllm_compile", str(folder / "config.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory) -> Iterator[Callable[[str], Path]]:
    """Waits for the folder of a model that has been compiled; those that this session tests are begun at once."""
    wanted = {item.callspec.params["name"] for item in request.session.items if item.module is request.module}
    folders = {name: tmp_path_factory.mktemp(name) for name in MODELS if name in wanted and name in CONFIG_MAPPING}
    with ThreadPoolExecutor(COMPILED_AT_ONCE) as beside:
        waiting = {}
        for name, folder in folders.items():
            save(name, folder)
            waiting[name] = beside.submit(compile_in_its_own_process, folder)

        def wait(name: str) -> Path:
            waiting[name].result()
            return folders[name]

        yield wait
        beside.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_as_near_to_float32_as_transformers_is_and_graphs_change_nothing(compiled, name):
    """On 40 prompts in one batch: of few scores the error is chance, as rounding sends tokens to other experts."""
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this Transformers has no {name}")
    folder = compiled(name)
    artifact = artifact_of(folder)
    parts: Any = assemble(EngineConfig.from_dict(config_of(folder)), Timeline(), num_pages=PAGES)
    with Engine.from_parts(parts) as engine:
        check_graphs(parts.step_runner._runner)
        prompts = [random_ids(3 + 3 * number, FIRST_SPECIAL_TOKEN, number) for number in range(REQUESTS)]
        read = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
        asked = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=0)
        written = engine.generate(prompts, asked)
    exact, rounded = reference(folder / "model", torch.float32), reference(folder / "model", torch.bfloat16)

    def errors(what: str, ours: torch.Tensor, texts: list[list[int]], last: int = 0) -> tuple[float, float]:
        want, theirs = (
            torch.cat([reference_scores(model, ids)[-last:] for ids in texts]) for model in (exact, rounded)
        )
        error, limit = ((one - want).abs().mean().item() for one in (ours, theirs))
        print(f"{name}, {what}: off by {error:.5f}, Transformers in bfloat16 by {limit:.5f}")
        assert error <= MARGIN * limit + 1e-3
        return error, limit

    of_prompts = errors(
        "prompts", torch.cat([scores_of(output, ids) for output, ids in zip(read, prompts, strict=True)]), prompts
    )
    texts = [ids + list(output.token_ids) for ids, output in zip(prompts, written, strict=True)]
    of_answers = errors("answers", torch.cat([scores_of_answer(output) for output in written]), texts, NEW)
    note_on_gpu(name, "", attention_of(artifact.program), of_prompts, of_answers)


def artifact_of(folder: Path) -> Artifact:
    (artifact,) = (open_artifact(path.parent) for path in (folder / "cache").rglob("program.json"))
    changed = {report["name"] for report in artifact.manifest.about["passes"] if report["matches"]}
    assert "group_experts" in changed
    return artifact


@torch.inference_mode()
def check_graphs(runner: ModelRunner) -> None:
    """Before the engine has work. Pages hold anything; what is captured reads the same as what is not."""
    graphs = graphs_of(runner)
    fill_pages(runner)
    for seed, num_requests in enumerate((1, 5, 8, 33)):
        batch = decode_batch(runner, num_requests, seed)
        mode, descriptor = graphs.dispatcher.dispatch(num_requests, num_requests, True)
        assert mode is CUDAGraphMode.FULL
        captured = graphs.run(batch).next_token_logits.clone()
        assert captured.isfinite().all()
        assert torch.equal(captured, uncaptured(runner, batch, descriptor)[:num_requests]), f"{num_requests} decodes"
    for seed, num_tokens in enumerate((37, 200)):
        batch = mixed_batch(runner, num_tokens, seed, longest_prefix=100)
        mode, descriptor = graphs.dispatcher.dispatch(num_tokens, batch.batch_size, False)
        assert mode is CUDAGraphMode.PIECEWISE
        captured = runner.forward(batch).next_token_logits.clone()
        assert captured.isfinite().all()
        assert torch.equal(captured, uncaptured(runner, batch, descriptor)), f"{num_tokens} tokens"
