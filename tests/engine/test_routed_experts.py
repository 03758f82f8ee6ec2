"""return_routed_experts: the experts that Transformers' router chooses for each token, however it was computed."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.errors import ConfigError, RequestError
from tests.model.tiny_configs import LAYERS, save_tiny_model, tiny_config

PROMPTS = [list(range(5, 40)), [10, 11, 12], list(range(5, 30)), [7] * 20]
ASKED = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, return_routed_experts=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts") / "model"
    save_tiny_model(tiny_config("qwen3_moe", num_experts=4, num_experts_per_tok=2), folder)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def engine(folder, cache, **runtime) -> Engine:
    sections = {
        "model": {"path": str(folder), "dtype": "float32"},
        "compile": {"backend": "eager"},
        "runtime": {"device": "cpu", "max_model_len": 64, "routed_experts": True, **runtime},
        "cache": {"dir": str(cache)},
    }
    return Engine(EngineConfig.from_dict(sections))


def chosen_by_transformers(folder, token_ids) -> np.ndarray:
    """[T, layers, k] of a text."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: list[torch.Tensor | None] = [None] * LAYERS

    def keep(index: int, module, args, output) -> None:
        found[index] = output[2]

    for index, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(partial(keep, index))
    with torch.no_grad():
        model(input_ids=torch.tensor([token_ids]), use_cache=False)
    return torch.stack(found, dim=1).numpy()


def check(folder, outputs) -> None:
    for output in outputs:
        token_ids = (output.prompt_token_ids + output.token_ids)[:-1]
        routes = output.outputs[0].routed_experts
        assert routes.dtype == np.int16
        assert np.array_equal(routes, chosen_by_transformers(folder, token_ids))


@pytest.mark.parametrize(
    "runtime",
    [
        {"page_size": 4, "max_num_batched_tokens": 16},
        pytest.param({"page_size": 4, "deterministic": True, "max_num_batched_tokens": 16}, marks=pytest.mark.slow),
    ],
    ids=["chunks and prefix hits", "deterministic"],
)
def test_routes_are_transformers_own(folder, cache, runtime):
    with engine(folder, cache, **runtime) as served:
        check(folder, served.generate(PROMPTS, ASKED))
        again = served.generate(PROMPTS, ASKED)
        assert again[0].num_cached_tokens
        check(folder, again)
        plain = served.generate(PROMPTS[:1], SamplingParams(max_tokens=2))
        assert plain[0].outputs[0].routed_experts is None


def test_what_keeps_no_routes_says_so(folder, cache):
    with engine(folder, cache, routed_experts=False) as served:
        (refused,) = served.generate(PROMPTS[:1], ASKED)
    assert "return_routed_experts: expected false" in refused.error
    with pytest.raises(RequestError, match="stop: expected none beside return_routed_experts"):
        SamplingParams(stop="a", return_routed_experts=True)
    with pytest.raises(ConfigError, match="routed_experts"):
        engine(folder, cache, expert_parallel_size=2)
