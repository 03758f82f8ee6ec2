"""Gradients of a trainable model: Transformers' of the same weights, for each kind of layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile import Engine, EngineConfig, SamplingParams, trainable
from tests.model.tiny_configs import save_tiny_model, tiny_config
from tests.sample import slow_but_a_sample
from tests.train.test_trainable import check_bitwise, packed

SAMPLED = SamplingParams(temperature=1.0, max_tokens=9, ignore_eos=True, logprobs=0, prompt_logprobs=0)
LENGTHS = (3, 11, 24)
# Transformers computes a recurrence in chunks, in other sums; its form by tokens is half as far (docs/lab/rollouts.md).
OF_RECURRENCES = 3e-4
ARCHITECTURES: dict[str, tuple[dict[str, Any], float]] = {
    "llama": ({}, 1e-4),
    "qwen2": ({}, 1e-4),  # biases, windows
    "gpt2": ({}, 1e-4),  # tied, transposed weights, learned positions
    "gemma2": ({"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}, 1e-4),
    "phi3": ({}, 1e-4),  # q, k and v are one parameter
    "bloom": ({}, 1e-4),  # ALiBi
    "qwen3_moe": ({}, 1e-4),
    "gpt_oss": ({}, 1e-4),  # sinks, biases of experts
    "deepseek_v3": ({}, 1e-4),  # latents
    "qwen3_next": ({}, OF_RECURRENCES),  # gated delta nets beside attention and experts
    "mamba2": ({}, OF_RECURRENCES),
    "lfm2": ({}, 1e-4),  # short convolutions
}


@pytest.mark.parametrize("architecture", slow_but_a_sample(ARCHITECTURES, 1))
def test_gradients_are_transformers(architecture: str, tmp_path: Path) -> None:
    changes, tolerance = ARCHITECTURES[architecture]
    reference = save_tiny_model(tiny_config(architecture, **changes), tmp_path / "model")
    sections = {
        "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
        "compile": {"backend": "eager"},
        "runtime": {"device": "cpu", "max_model_len": 64, "deterministic": True},
        "cache": {"dir": str(tmp_path / "cache")},
    }
    config = EngineConfig.from_dict(sections)
    with Engine(config) as engine:
        prompts = [[(7 * i + 3 * length) % 60 + 1 for i in range(length)] for length in LENGTHS]
        outputs = engine.generate(prompts, SAMPLED)
    module = trainable(config)
    check_bitwise(module, outputs)
    ids, lengths = packed(outputs)
    weights = torch.linspace(-1, 2, len(ids))
    (module(ids, lengths) * weights).sum().backward()
    expected_loss(reference, ids, lengths, weights).backward()
    theirs = dict(reference.named_parameters())
    named = {name: parameter for name, parameter in module.named_parameters() if name in theirs}
    assert named.keys() == theirs.keys()
    for name, parameter in named.items():
        difference = torch.linalg.vector_norm(parameter.grad - theirs[name].grad)
        assert difference <= tolerance * torch.linalg.vector_norm(theirs[name].grad), name
    module.close()


def expected_loss(reference: Any, ids: list[int], lengths: list[int], weights: torch.Tensor) -> torch.Tensor:
    """The weighted log-probabilities of each sequence by itself."""
    total, start = torch.zeros(()), 0
    for length in lengths:
        own = torch.tensor(ids[start : start + length])
        logits = reference(own[None], use_cache=False).logits[0, :-1]
        scores = torch.log_softmax(logits, dim=-1).gather(1, own[1:, None]).squeeze(1)
        total = total + (scores * weights[start + 1 : start + length]).sum()
        start += length
    return total
