"""Texts longer than the keys that an indexer chooses have Transformers' tokens, whatever happens on the way.

Tiny random models in float32 on a CPU. Indexers have many heads: where all of few are 0, scores are equal, and which of
equal ones is chosen no one says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mllm_compile import SamplingParams
from mllm_compile.config.schema import EngineConfig
from mllm_compile.runtime.memory_pool import KVPool
from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN, save_tiny_model, tiny_config
from tests.sample import slow_but_a_sample
from tests.tiny_model import engine_of_pages, tokens_with_ngrams

TOP, PAGE, CHUNK, MAX_TOKENS = 8, 4, 32, 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
# hy_v4 has a head of keys for several queries, and sinks; layers of glm_moe_dsa take what one ahead has chosen. In
# minimax_m3_vl_text each head of keys has one of the indexer, which chooses blocks.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "deepseek_v32": {},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"] * 2},
    "axk2": {},
    "hy_v4": {},
    "minimax_m3_vl_text": {
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": TOP // 4,
        "layer_types": ["minimax_m3_sparse"] * 4,
    },
}


@dataclass(frozen=True)
class Served:
    model: Any
    folder: Path
    prompts: list[list[int]]

    def config(self, **runtime: Any) -> EngineConfig:
        sizes = {"device": "cpu", "max_model_len": 96, "max_num_batched_tokens": CHUNK, "page_size": PAGE}
        sections = {
            "model": {"path": str(self.folder / "model"), "dtype": "float32"},
            "compile": {"backend": "eager"},
            "runtime": sizes | {"max_running_requests": 8} | runtime,
            "cache": {"dir": str(self.folder / "cache")},
        }
        return EngineConfig.from_dict(sections)

    @torch.no_grad()
    def greedy(self, prompt: list[int]) -> list[int]:
        ids = list(prompt)
        for _ in range(MAX_TOKENS):
            ids.append(int(self.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        return ids[len(prompt) :]


@pytest.fixture(scope="module", params=slow_but_a_sample(ARCHITECTURES, 1))
def served(request, tmp_path_factory) -> Served:
    folder = tmp_path_factory.mktemp(request.param)
    changes = {"index_topk": TOP, "index_n_heads": 16, "eos_token_id": None} | ARCHITECTURES[request.param]
    save_tiny_model(tiny_config(request.param, **changes), folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(3)
    lengths = (1, 6, TOP, 20, 70)
    return Served(
        model, folder, [torch.randint(0, FIRST_SPECIAL_TOKEN, (n,), generator=generator).tolist() for n in lengths]
    )


@pytest.fixture(scope="module")
def expected(served) -> list[list[int]]:
    return [served.greedy(prompt) for prompt in served.prompts]


@pytest.fixture(scope="module")
def engine(served) -> Iterator[Any]:
    engine = engine_of_pages(served.config(), None)
    yield engine
    engine.close()


def tokens_of(outputs) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


def test_tokens_of_a_mixed_batch_in_chunks_match_transformers(served, engine, expected):
    assert tokens_of(engine.generate(served.prompts, GREEDY)) == expected


def test_log_probabilities_match_transformers(served, engine):
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=3, ignore_eos=True)
    for prompt, output in zip(served.prompts, engine.generate(served.prompts, params), strict=True):
        with torch.no_grad():
            logits = served.model(torch.tensor([[*prompt, *output.token_ids]]), use_cache=False).logits[0]
        for row, candidates in zip(logits.log_softmax(-1)[len(prompt) - 1 : -1], output.logprobs, strict=True):
            for token, candidate in candidates.items():
                assert candidate.logprob == pytest.approx(row[token].item(), abs=1e-4)


def test_a_prefix_hit_gives_the_tokens_of_a_cold_prompt(served, engine):
    prompt = [*served.prompts[-1][:50], 7, 8, 9]
    before = engine.stats().prefix_hit_tokens
    assert tokens_of(engine.generate([served.prompts[-1]], GREEDY)) == [served.greedy(served.prompts[-1])]
    assert tokens_of(engine.generate([prompt], GREEDY)) == [served.greedy(prompt)]
    assert engine.stats().prefix_hit_tokens > before


def test_preempted_requests_have_the_same_tokens(served, expected):
    engine = engine_of_pages(served.config(), 1 + 26)
    try:
        assert tokens_of(engine.generate(served.prompts[::-1], GREEDY)) == expected[::-1]
        assert engine.stats().preemptions > 0
    finally:
        engine.close()


@pytest.mark.parametrize("runtime", [{"deterministic": True}, {"enable_prefix_cache": False}], ids=str)
def test_other_settings_serve_it_too(served, expected, runtime):
    engine = engine_of_pages(served.config(**runtime), None)
    try:
        assert tokens_of(engine.generate(served.prompts, GREEDY)) == expected
    finally:
        engine.close()


def test_a_cache_in_eight_bits_chooses_as_float32_of_the_rounded_keys_does(served, engine, monkeypatch):
    """Keys in eight bits may choose others than Transformers does, and each choice changes log-probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=0, prompt_logprobs=0, ignore_eos=True)

    def scores(engine: Any) -> list[list[float]]:
        outputs = engine.generate(served.prompts, params)
        return [
            [entry[token].logprob for entry, token in zip(entries[1:], ids[1:], strict=True)]
            for output in outputs
            for entries, ids in [
                ([*output.prompt_logprobs, *output.logprobs], [*output.prompt_token_ids, *output.token_ids])
            ]
        ]

    exact = scores(engine)
    in_eight_bits = engine_of_pages(served.config(kv_cache_dtype="fp8_e4m3"), None)
    try:
        found = scores(in_eight_bits)
    finally:
        in_eight_bits.close()
    write = KVPool.set_kv_buffer

    def write_rounded(pool: Any, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        write(pool, layer, slots, *(one.to(torch.float8_e4m3fn).to(one.dtype) for one in (k, v)))

    monkeypatch.setattr(KVPool, "set_kv_buffer", write_rounded)
    rounded = engine_of_pages(served.config(enable_prefix_cache=False), None)
    try:
        expected = scores(rounded)
    finally:
        rounded.close()
    for some, others, of_floats in zip(found, expected, exact, strict=True):
        assert some == pytest.approx(others, abs=1e-5)
        assert len(some) < 2 * PAGE or some != pytest.approx(of_floats, abs=1e-4)


def test_drafts_of_the_text_s_own_words_change_no_token(served, expected):
    assert tokens_with_ngrams(served.config(), served.prompts, GREEDY) == expected
