"""Experts that the forward chose are replayed where gradients go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mllm_compile import Engine, EngineConfig, SamplingParams, trainable
from mllm_compile.train.trainable import Trainable
from tests.model.tiny_configs import save_tiny_model, tiny_config
from tests.sample import slow_but_a_sample
from tests.train.test_gradients import expected_loss
from tests.train.test_trainable import packed

ASKED = SamplingParams(
    temperature=1.0, max_tokens=9, ignore_eos=True, logprobs=0, prompt_logprobs=0, return_routed_experts=True
)
PROMPTS = [[(7 * i + 3 * length) % 60 + 1 for i in range(length)] for length in (3, 11, 24)]
EXPERTS = {"num_experts_per_tok": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS | {"num_experts": 4},
    "gpt_oss": EXPERTS | {"num_local_experts": 4},  # a softmax over the chosen
    "deepseek_v3": EXPERTS | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1},  # weights by the ids, groups
}


def gradients_of(module: Trainable) -> dict[str, torch.Tensor]:
    found = {name: one.grad.clone() for name, one in module.named_parameters() if one.grad is not None}
    module.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("architecture", slow_but_a_sample(ARCHITECTURES, 1))
def test_gradients_go_to_the_experts_that_the_rollout_chose(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = save_tiny_model(tiny_config(architecture, **ARCHITECTURES[architecture]), tmp_path / "model")
    config = EngineConfig.from_dict(
        {
            "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
            "compile": {"backend": "eager"},
            "runtime": {"device": "cpu", "max_model_len": 64, "deterministic": True, "routed_experts": True},
            "cache": {"dir": str(tmp_path / "cache")},
        }
    )
    with Engine(config) as engine:
        outputs = engine.generate(PROMPTS, ASKED)
    ids, lengths = packed(outputs)
    weights, starts = torch.linspace(-1, 2, len(ids)), np.cumsum([0, *lengths])
    module, seen = trainable(config), []
    run = module._gradients.run

    def watched(*args: Any) -> None:
        seen.append(args[-1])
        run(*args)

    monkeypatch.setattr(module._gradients, "run", watched)
    (module(ids, lengths) * weights).sum().backward()
    found = gradients_of(module)
    replayed = np.stack([seen[0][f"routes.{layer}"].numpy() for layer in range(len(seen[0]))], axis=1)
    for output, start, end in zip(outputs, starts, starts[1:], strict=False):
        assert np.array_equal(output.outputs[0].routed_experts, replayed[start : end - 1])
    expected_loss(reference, ids, lengths, weights).backward()
    for name, theirs in reference.named_parameters():
        if name in found and theirs.grad is not None:
            assert torch.linalg.vector_norm(found[name] - theirs.grad) <= 2e-4 * torch.linalg.vector_norm(theirs.grad)

    scores = module._score(torch.tensor(ids), lengths, 1.0)
    first_two = np.broadcast_to(np.array([0, 1], dtype=np.int16), scores.routes.shape)
    elsewhere = module._gradients_of(torch.tensor(ids), lengths, 1.0, weights, first_two)
    named = zip(module.named_parameters(), elsewhere, strict=True)
    of_experts = [one for (name, _), one in named if name.endswith("experts.down_proj")]
    assert of_experts
    for one in of_experts:
        assert one is not None and one[:2].any() and not one[2:].any()
    module.close()
