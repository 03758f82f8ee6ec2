"""A trainable model in 16 bits on a GPU: a rollout's log-probabilities are bitwise its own, its gradients are near."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from mllm_compile import Engine, EngineConfig, SamplingParams, trainable
from mllm_compile.kernels.cuda import can_compile_kernels
from tests.gpu.small_shape import WIDE
from tests.gpu.test_any_rows import OF_EXPERTS
from tests.gpu.test_served_models import reference
from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN, save_tiny_model, tiny_config
from tests.train.test_gradients import expected_loss
from tests.train.test_trainable import check_bitwise, packed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not can_compile_kernels("cuda:0"), reason="needs a Hopper GPU and NVRTC"
    ),
]

# Architecture, sizes, and what its config says of the runtime.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("qwen3", WIDE | {"intermediate_size": 1024}, {}),
    "experts": ("qwen3_moe", OF_EXPERTS, {"routed_experts": True}),
    "delta nets": ("qwen3_5_text", WIDE, {}),
}
MARGIN = 1.5


@pytest.mark.parametrize("kind", MODELS)
def test_a_rollouts_log_probabilities_are_bitwise_and_gradients_as_near_as_transformers(
    kind: str, tmp_path: Path
) -> None:
    architecture, sizes, runtime = MODELS[kind]
    save_tiny_model(tiny_config(architecture, **sizes, max_position_embeddings=1024), tmp_path / "model")
    sections = {
        "model": {"path": str(tmp_path / "model"), "dtype": "bfloat16"},
        "cudagraph": {"decode_requests": [64], "piecewise_tokens": [64]},
        "runtime": {"device": "cuda", "deterministic": True, "max_model_len": 1024, "page_size": 16} | runtime,
        "cache": {"dir": str(tmp_path / "cache")},
    }
    config, rng = EngineConfig.from_dict(sections), Random(3)
    prompts = [[rng.randrange(FIRST_SPECIAL_TOKEN) for _ in range(n)] for n in (300, 3, 70, 500, 20, 130)]
    params = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    with Engine(config) as engine:
        outputs = engine.generate(prompts, params)
    module = trainable(config)
    check_bitwise(module, outputs)
    ids, lengths = packed(outputs[1:3])
    weights = torch.linspace(-1, 2, len(ids))
    (module(ids, lengths).cpu() * weights).sum().backward()
    ours = {name: one.grad.float().cpu() for name, one in module.named_parameters() if one.grad is not None}
    module.close()
    exact, rounded = (_of_transformers(tmp_path / "model", dtype, ids, lengths) for dtype in ("float32", "bfloat16"))
    assert ours.keys() <= exact.keys() and len(ours) > 10
    for name, one in ours.items():
        error, limit = (torch.linalg.vector_norm(other - exact[name]) for other in (one, rounded[name]))
        assert error <= MARGIN * limit + 0.02 * torch.linalg.vector_norm(exact[name]), name


def _of_transformers(folder: Path, dtype: str, ids: list[int], lengths: list[int]) -> dict[str, torch.Tensor]:
    """Gradients by Transformers."""
    model = reference(folder, getattr(torch, dtype)).requires_grad_(True)
    with torch.enable_grad(), torch.device("cuda"):
        expected_loss(model, ids, lengths, torch.linspace(-1, 2, len(ids))).backward()
    return {name: one.grad.float().cpu() for name, one in model.named_parameters() if one.grad is not None}
