"""Checkpoints with a tower whose images are not served: their text is, as Transformers gives it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForImageTextToText

from mllm_compile import Engine, EngineConfig, SamplingParams
from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN, tiny_config
from tests.sample import slow_but_a_sample

MAX_TOKENS = 10


# Mllama's layers that attend to images are passed over by a text without any.
ARCHITECTURES = ("llama4", "mllama", "qwen4_exp", "minimax_m3_vl")


@pytest.mark.parametrize("architecture", slow_but_a_sample(ARCHITECTURES, 1))
def test_a_whole_checkpoint_gives_the_tokens_of_its_text(architecture, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(tiny_config(architecture), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path / "model")
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, FIRST_SPECIAL_TOKEN, (length,), generator=generator).tolist() for length in (3, 41)]
    sections = {
        "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
        "compile": {"backend": "eager"},
        "runtime": {"device": "cpu", "max_model_len": 64, "max_num_batched_tokens": 32, "page_size": 4},
        "cache": {"dir": str(tmp_path / "cache")},
    }
    with Engine(EngineConfig.from_dict(sections)) as engine:
        asked = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        found = [list(output.token_ids) for output in engine.generate(prompts, asked)]
    assert found == [_greedy(model, prompt) for prompt in prompts]


@torch.no_grad()
def _greedy(model, prompt):
    ids = list(prompt)
    for _ in range(MAX_TOKENS):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]
