"""Eight architectures with no code of their own: what Transformers generates, in float32 on a CPU, exactly.

Tiny random models, served through Engine in batches of mixed lengths, long prompts in chunks; windows are shorter than
the texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from mllm_compile import Engine, SamplingParams
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.schema import EngineConfig
from mllm_compile.runtime.attention.layer import LayerSpec
from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN, WINDOW, save_tiny_model, tiny_config
from tests.sample import slow_but_a_sample

PROMPT_LENGTHS = (1, 2, 7, 23, 40)
MAX_TOKENS = 16
CHUNK = 32  # tokens of one step: the longest prompt takes two

_EVERY = WINDOW - 1
# Architecture → changes to the tiny config, window_left of the layers, soft cap of the layers.
ARCHITECTURES: dict[str, tuple[dict[str, Any], list[int], float]] = {
    "qwen3": ({"use_sliding_window": False, "layer_types": None}, [-1] * 4, 0.0),
    "qwen2": ({"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2}, [-1, -1, _EVERY, _EVERY], 0.0),
    "llama": (
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        [-1] * 4,
        0.0,
    ),
    "mistral": ({}, [_EVERY] * 4, 0.0),
    "phi3": (
        {
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [4.0] * 8,
            },
        },
        [_EVERY] * 4,
        0.0,
    ),
    "gemma2": ({"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}, [_EVERY, -1] * 2, 2.0),
    "gemma4_text": ({"global_head_dim": 32, "num_kv_shared_layers": 2}, [_EVERY, -1] * 2, 0.0),
    "olmo2": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        [-1] * 4,
        0.0,
    ),
}


@dataclass(frozen=True)
class Served:
    engine: Engine
    layers: tuple[LayerSpec, ...]
    model: Any
    windows: list[int]
    soft_cap: float
    prompts: list[list[int]]

    @torch.no_grad()
    def greedy(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        # Without a mask, generate takes every token of the prompt that equals pad_token_id for padding.
        generated = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
        return generated[0, len(prompt) :].tolist()

    @torch.no_grad()
    def log_probs(self, tokens: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)


@pytest.fixture(scope="module", params=slow_but_a_sample(ARCHITECTURES, 3))
def served(request, tmp_path_factory):
    changes, windows, soft_cap = ARCHITECTURES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    tokens = {"eos_token_id": None, "bos_token_id": None}
    model = save_tiny_model(tiny_config(request.param, **tokens, **changes), folder / "model")
    model.set_attn_implementation("eager")  # up to Transformers 5.17, sdpa drops soft caps in silence
    config = EngineConfig.from_dict(
        {
            "model": {"path": str(folder / "model"), "dtype": "float32"},
            "compile": {"backend": "eager"},
            "runtime": {"device": "cpu", "max_model_len": 64, "max_num_batched_tokens": CHUNK, "page_size": 4},
            "cache": {"dir": str(folder / "cache")},
        }
    )
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, FIRST_SPECIAL_TOKEN, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    with Engine(config) as engine:
        layers = load_or_compile(config).artifact.program.layers
        yield Served(engine, layers, model, windows, soft_cap, prompts)


def test_greedy_tokens_of_a_mixed_batch_match_transformers(served):
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    outputs = served.engine.generate(served.prompts, params)
    assert [output.token_ids for output in outputs] == [served.greedy(prompt) for prompt in served.prompts]


def test_log_probabilities_match_transformers(served):
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=5)
    for prompt, output in zip(served.prompts, served.engine.generate(served.prompts, params), strict=True):
        expected = served.log_probs([*prompt, *output.token_ids])[len(prompt) - 1 : -1]
        for row, candidates in zip(expected, output.logprobs, strict=True):
            assert len(candidates) >= 5
            for token, candidate in candidates.items():
                assert candidate.logprob == pytest.approx(row[token].item(), abs=1e-4)


def test_a_prompt_alone_gives_what_it_gives_in_a_batch(served):
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    together = served.engine.generate(served.prompts, params)
    for prompt, output in zip(served.prompts[2:4], together[2:4], strict=True):
        assert served.engine.generate([prompt], params)[0].token_ids == output.token_ids


def test_windows_and_soft_caps_reach_the_layers(served):
    assert [layer.window_left for layer in served.layers] == served.windows
    assert {layer.logits_soft_cap for layer in served.layers} == {served.soft_cap}
