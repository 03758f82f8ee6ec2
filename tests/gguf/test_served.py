"""Every architecture is served from its file: greedy tokens equal Transformers' on the same numbers (float32)."""

from __future__ import annotations

import pytest
import torch

from mllm_compile import Engine, SamplingParams
from tests.gguf.test_architectures import mixed
from tests.gguf.writer import MODELS, tiny_model, write_model
from tests.sample import slow_but_a_sample

PROMPTS = [[3, 5, 7, 9], list(range(20, 40))]
TOKENS = 8


def greedy(model, prompt, tokens=TOKENS):
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def config_of(path, cache, **runtime):
    return {
        "model": {"path": str(path)},
        "compile": {"backend": "eager"},
        "runtime": {"device": "cpu", "max_model_len": 64, "page_size": 4, **runtime},
        "cache": {"dir": str(cache)},
    }


def assert_served(name, folder, **runtime):
    model = tiny_model(name)
    write_model(model, name, folder / "model.gguf", mixed)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with Engine(config_of(folder / "model.gguf", folder / "cache", **runtime)) as engine:
        found = [one.outputs[0].token_ids for one in engine.generate(PROMPTS, params, progress=False)]
    assert found == [greedy(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("name", slow_but_a_sample(MODELS, 1))
def test_tokens_match_transformers(name, tmp_path):
    assert_served(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen35", "bloom", "falcon", "gpt-oss"])
def test_ranks_take_their_part_of_tensors_that_converters_have_changed(name, tmp_path):
    assert_served(name, tmp_path, tensor_parallel_size=2)
