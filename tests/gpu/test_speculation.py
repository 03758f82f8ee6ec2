"""Speculation on a GPU: bitwise the answers without drafts where steps are deterministic, else within bf16's noise."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile import Engine, EngineConfig, RequestOutput, SamplingParams, StructuredOutputsParams
from mllm_compile.engine.memory_plan import MemoryPlan
from mllm_compile.runtime.cuda_graph.verifies import VerifyGraphs
from mllm_compile.runtime.schedule.scheduler import Scheduler
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
    params: SamplingParams | Sequence[SamplingParams],
    method: str,
    prompts: Sequence[Any] = PROMPTS,
    mode: str = "auto",
    **runtime: Any,
) -> tuple[list[RequestOutput], Any]:
    sections = {
        "model": {"path": str(TINY), "dtype": "bfloat16"},
        "cudagraph": {"mode": mode},
        "runtime": {"device": "cuda"} | runtime,
        "speculative": {"method": method} | ({} if method == "none" else {"num_speculative_tokens": 4}),
        "cache": {"dir": str(cache)},
    }
    with Engine(EngineConfig.from_dict(sections)) as engine:
        return engine.generate(list(prompts), params), engine.stats()


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


@pytest.mark.parametrize("deterministic", [True, False])
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


@pytest.fixture
def launches(monkeypatch) -> list[tuple[int, bool]]:
    """Of each captured verify step its requests, and whether one was in flight when it was planned."""
    found: list[tuple[int, bool]] = []
    launch = VerifyGraphs.launch

    def noted(graphs, fields):
        found.append((len(fields), bool((fields[:, 1] < 0).any())))
        return launch(graphs, fields)

    monkeypatch.setattr(VerifyGraphs, "launch", noted)
    return found


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_steps_in_one_launch_give_the_likeliest_tokens(cache, launches, method):
    greedy = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    outputs, stats = answers(cache, greedy, method, PROMPTS * 3)
    assert len(launches) > 20
    assert any(is_ahead for _, is_ahead in launches) is (method == "ngram")
    assert stats.accepted_tokens > 50
    check_likeliest(cache, outputs)


def test_answers_of_steps_in_one_launch_end_where_those_of_plain_decodes_do(cache, launches):
    """Bfloat16's noise parts some answers at a near tie."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(24)]
    params = [
        SamplingParams(
            temperature=0.6 if i % 3 == 0 else 0.0,
            seed=i,
            max_tokens=5 + 9 * i % 80,
            ignore_eos=True,
            stop=["print", "for"][: i % 3],
        )
        for i in range(24)
    ]
    drafted, _ = answers(cache, params, "ngram", prompts)
    assert sum(is_ahead for _, is_ahead in launches) > 20
    plain, _ = answers(cache, params, "none", prompts)
    same = [one.token_ids == other.token_ids for one, other in zip(drafted, plain, strict=True)]
    assert sum(same) > 16
    for one, other, is_same in zip(drafted, plain, same, strict=True):
        if is_same:
            assert (one.finish_reason, one.stop_reason, one.text) == (
                other.finish_reason,
                other.stop_reason,
                other.text,
            )


def test_preempted_requests_in_steps_of_one_launch_get_the_likeliest_tokens(cache, launches, monkeypatch):
    preempted = []
    preempt = Scheduler._preempt
    monkeypatch.setattr(Scheduler, "_preempt", lambda self, *of: preempted.append(of) or preempt(self, *of))
    monkeypatch.setattr(MemoryPlan, "pages_from", lambda self, plan: 81)
    greedy = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    prompts = [[7 + i, *range(20, 60)] * 2 for i in range(8)]
    few = {"page_size": 16, "max_model_len": 256, "max_running_requests": 8}
    outputs, _ = answers(cache, greedy, "ngram", prompts, **few)
    assert preempted
    assert any(is_ahead for _, is_ahead in launches)
    monkeypatch.undo()
    check_likeliest(cache, outputs)
