"""Speculation on a GPU: bitwise the answers without drafts where steps are deterministic, else within bf16's noise."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile import Engine, EngineConfig, RequestOutput, SamplingParams, StructuredOutputsParams
from tests.tiny_model import TINY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

PROMPTS = [
    "x = 1\n" * 40,
    "for name in names:\n    print(name)\n" * 6,
    "The for statement is used to iterate over the elements of a sequence",
    "A",
]
NOISE = 0.1  # of a log-probability in bfloat16, between two shapes of the same step


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def answers(
    cache: Path,
    params: SamplingParams,
    method: str,
    prompts: Sequence[Any] = PROMPTS,
    mode: str = "auto",
    **runtime: Any,
) -> tuple[list[RequestOutput], Any]:
    sections = {
        "model": {"path": str(TINY), "dtype": "bfloat16"},
        "cudagraph": {"mode": mode},
        "runtime": {"device": "cuda", "max_total_tokens": 20000} | runtime,
        "speculative": {"method": method} | ({} if method == "none" else {"num_speculative_tokens": 4}),
        "cache": {"dir": str(cache)},
    }
    with Engine(EngineConfig.from_dict(sections)) as engine:
        return engine.generate(list(prompts), params), engine.stats()


@pytest.mark.parametrize("deterministic", [False, True])
def test_answers_of_a_form_that_were_drafted_have_it(cache, deterministic):
    asked = StructuredOutputsParams(regex="(x = [0-9]{1,3}\n){16}")
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=200, structured_outputs=asked)
    plain, _ = answers(cache, params, "none", deterministic=deterministic)
    drafted, stats = answers(cache, params, "ngram", deterministic=deterministic)
    assert stats.accepted_tokens > 20
    assert all(re.fullmatch("(x = [0-9]{1,3}\n){16}", output.text) for output in drafted)
    if deterministic:
        assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]


@pytest.mark.parametrize("mode", ["full_and_piecewise", "none"])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_each_greedy_token_is_the_likeliest_behind_those_before_it(cache, method, mode):
    greedy = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
    outputs, stats = answers(cache, greedy, method, mode=mode)
    assert stats.accepted_tokens > 20
    check_likeliest(cache, outputs)


def check_likeliest(cache: Path, outputs: Sequence[RequestOutput]) -> None:
    """By the prompt's log-probabilities of prompt and answer together, which no draft has been near."""
    texts = [output.prompt_token_ids + output.token_ids for output in outputs]
    scored, _ = answers(cache, SamplingParams(max_tokens=1, prompt_logprobs=1), "none", texts)
    for output, score in zip(outputs, scored, strict=True):
        assert score.prompt_logprobs is not None
        behind = score.prompt_logprobs[len(output.prompt_token_ids) :]
        for token, entry in zip(output.token_ids, behind, strict=True):
            assert entry is not None
            best = max(candidate.logprob for candidate in entry.values())
            assert entry[token].logprob > best - NOISE


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_deterministic_steps_give_the_same_tokens_and_bits(cache, method, temperature):
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=96, ignore_eos=True, logprobs=1)
    plain, _ = answers(cache, params, "none", deterministic=True)
    drafted, stats = answers(cache, params, method, deterministic=True)
    assert stats.accepted_tokens > 20
    for ours, theirs in zip(drafted, plain, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == theirs.logprobs
