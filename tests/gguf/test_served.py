"""Every architecture is served from its file: greedy tokens equal Transformers' on the same numbers (float32)."""

from __future__ import annotations

import re
from types import MappingProxyType

import gguf
import pytest
import torch

from mllm_compile import Engine, SamplingParams
from mllm_compile.config.resolution.device import has_panels
from tests.gguf.test_architectures import mixed
from tests.gguf.writer import MODELS, tiny_model, write_model
from tests.sample import slow_but_a_sample

Q = gguf.GGMLQuantizationType
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


def assert_served(name, folder, kinds=mixed, backend="eager", sizes=MappingProxyType({}), **runtime):
    model = tiny_model(name, **sizes)
    write_model(model, name, folder / "model.gguf", kinds)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    config = config_of(folder / "model.gguf", folder / "cache", **runtime) | {"compile": {"backend": backend}}
    with Engine(config) as engine:
        found = [one.outputs[0].token_ids for one in engine.generate(PROMPTS, params, progress=False)]
    assert found == [greedy(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("name", slow_but_a_sample(MODELS, 1))
def test_tokens_match_transformers(name, tmp_path):
    assert_served(name, tmp_path)


IN_BLOCKS = {
    "gpt-oss": (Q.MXFP4, {"layer_types": ["sliding_attention", "full_attention"], "intermediate_size": 64}),
    "qwen3moe": (Q.Q4_1, {}),
}


@pytest.mark.slow
@pytest.mark.skipif(not has_panels("cpu"), reason="experts compute from blocks on a CPU with AVX2 alone")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_experts_that_compute_from_the_files_blocks_match_transformers(name, deterministic, tmp_path):
    kind, sizes = IN_BLOCKS[name]
    options = {"deterministic": True, "enable_prefix_cache": False} if deterministic else {}
    sizes = {"num_hidden_layers": 2, **sizes}
    assert_served(name, tmp_path, lambda name: kind if "_exps" in name else Q.Q8_0, "inductor", sizes, **options)
    (program,) = (tmp_path / "cache").rglob("program.json")
    assert re.search(r'"panels": \{[^}]*layers\.0\.mlp\.experts\.gate_up_proj"', program.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen35", "bloom", "falcon", "gpt-oss"])
def test_ranks_take_their_part_of_tensors_that_converters_have_changed(name, tmp_path):
    assert_served(name, tmp_path, tensor_parallel_size=2)
