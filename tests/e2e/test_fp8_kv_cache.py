"""`runtime.kv_cache_dtype: fp8_e4m3` through the whole engine, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mllm_compile import Engine, RequestOutput, SamplingParams
from tests.tiny_model import tiny_config

TEXT = "If the file cannot be opened, an OSError is raised. The argument is\n" * 3
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, prompt_logprobs=0)
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(eager_cache: Path) -> Iterator[Engine]:
    with make(eager_cache) as engine:
        yield engine


def make(cache: Path, **runtime: Any) -> Engine:
    runtime = {"kv_cache_dtype": "fp8_e4m3"} | runtime
    return Engine(tiny_config(cache, compile={"backend": "eager"}, runtime=runtime))


def scores(output: RequestOutput) -> list[float]:
    pairs = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
    return [entry[token].logprob for entry, token in pairs]


def test_log_probabilities_stay_near_the_model_s_own_types(engine, eager_cache):
    with make(eager_cache, kv_cache_dtype="auto") as plain_engine:
        plain = scores(plain_engine.generate(TEXT, PARAMS)[0])
    differences = [abs(a - b) for a, b in zip(scores(engine.generate(TEXT, PARAMS)[0]), plain, strict=True)]
    # docs/lab/serving.md has the figures: a mean of 0.04, at most 0.4.
    assert 0 < sum(differences) / len(differences) < 0.1
    assert max(differences) < 0.6


def test_a_prefix_hit_and_chunks_change_no_token(engine, eager_cache):
    engine.flush_prefix_cache()
    cold, warm = (engine.generate(TEXT, GREEDY)[0] for _ in range(2))
    assert warm.num_cached_tokens > cold.num_cached_tokens == 0
    assert warm.token_ids == cold.token_ids
    with make(eager_cache, max_num_batched_tokens=16, enable_prefix_cache=False) as chunked:
        assert chunked.generate(TEXT, GREEDY)[0].token_ids == cold.token_ids
