"""Verify steps in one launch on a GPU, of one model that is compiled once: the tokens of plain decodes, within bf16's
noise."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile import Engine, EngineConfig, RequestOutput, SamplingParams
from mllm_compile.engine.start import assemble
from mllm_compile.engine.start.memory_plan import MemoryPlan
from mllm_compile.runtime.cuda_graph.verifies import VerifyGraphs
from mllm_compile.runtime.schedule.lifecycle import Lifecycle
from mllm_compile.runtime.schedule.trial_budget import TrialBudget
from mllm_compile.runtime.speculation.depth import DepthByCost
from tests.gpu.test_speculation import NOISE, PROMPTS
from tests.tiny_model import TINY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def launches(monkeypatch) -> list[tuple[int, bool]]:
    """Of each captured verify step its requests, and whether one was in flight when it was planned."""
    found: list[tuple[int, bool]] = []
    launch = VerifyGraphs.launch

    def noted(graphs, fields, *of_step):
        found.append((len(fields), bool((fields[:, 1] < 0).any())))
        return launch(graphs, fields, *of_step)

    monkeypatch.setattr(VerifyGraphs, "launch", noted)
    return found


def answers(
    cache: Path,
    params: SamplingParams | Sequence[SamplingParams],
    prompts: Sequence[Any],
    method: str = "ngram",
    drafts: bool = True,
    most: int | str = 4,
) -> tuple[list[RequestOutput], Any]:
    """Answers and figures; without drafts by the same compiled program."""
    sections = {
        "model": {"path": str(TINY), "dtype": "bfloat16"},
        "runtime": {"device": "cuda", "page_size": 16, "max_running_requests": 32},
        "speculative": {"method": method, "num_speculative_tokens": most},
        "cache": {"dir": str(cache)},
    }
    with pytest.MonkeyPatch.context() as patch:
        if not drafts:
            patch.setattr(assemble, "make_speculation", lambda *of: None)
        with Engine(EngineConfig.from_dict(sections)) as engine:
            return engine.generate(list(prompts), params), engine.stats()


def check_likeliest(cache: Path, outputs: Sequence[RequestOutput]) -> None:
    """By the prompt's log-probabilities of prompt and answer together, which no draft has been near."""
    texts = [output.prompt_token_ids + output.token_ids for output in outputs]
    scored, _ = answers(cache, SamplingParams(max_tokens=1, prompt_logprobs=1), texts, drafts=False)
    for output, score in zip(outputs, scored, strict=True):
        assert score.prompt_logprobs is not None
        behind = score.prompt_logprobs[len(output.prompt_token_ids) :]
        for token, entry in zip(output.token_ids, behind, strict=True):
            assert entry is not None
            best = max(candidate.logprob for candidate in entry.values())
            assert entry[token].logprob > best - NOISE


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_steps_in_one_launch_give_the_likeliest_tokens(cache, launches, method):
    """Drafts of the host, and of the device while a step is in flight."""
    greedy = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    outputs, stats = answers(cache, greedy, PROMPTS * 3, method)
    assert len(launches) > 20, "the start has left them out"
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
    drafted, _ = answers(cache, params, prompts)
    assert sum(is_ahead for _, is_ahead in launches) > 20
    plain, _ = answers(cache, params, prompts, drafts=False)
    same = [one.token_ids == other.token_ids for one, other in zip(drafted, plain, strict=True)]
    assert sum(same) > 14
    ends = [[(o.finish_reason, o.outputs[0].stop_reason, o.text) for o in outputs] for outputs in (drafted, plain)]
    assert all(one == other for one, other, is_same in zip(*ends, same, strict=True) if is_same)


OTHERS = ({}, {"logprobs": 2}, {"presence_penalty": 0.2}, {"logit_bias": {11: 1.0}}, {"min_tokens": 90}, {"top_k": 5})


@pytest.mark.parametrize("most", [4, "auto"])
def test_all_parameters_are_served_in_one_launch_while_one_runs(cache, launches, most, monkeypatch):
    """With `auto` all depths take turns: which ones pay is the GPU's to say, and of this model perhaps none."""
    depths = count()
    monkeypatch.setattr(TrialBudget, "is_left", True)
    monkeypatch.setattr(DepthByCost, "choose_alike", lambda self, rows, num, of, **_: of[next(depths) % len(of)])
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(12)]
    params = [SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=True, **OTHERS[i % 6]) for i in range(12)]
    drafted, stats = answers(cache, params, prompts, most=most)
    assert sum(is_ahead for _, is_ahead in launches) > 5
    assert stats.accepted_tokens > 20
    plain, _ = answers(cache, params, prompts, drafts=False)
    same = [one.token_ids == other.token_ids for one, other in zip(drafted, plain, strict=True)]
    assert sum(same) > 6, "bfloat16's noise parts some at a near tie"
    for one, other, is_same in zip(drafted, plain, same, strict=True):
        ours, theirs = (
            [found and max(x.logprob for x in found.values()) for found in o.outputs[0].logprobs or ()]
            for o in (one, other)
        )
        assert not is_same or ours == pytest.approx(theirs, abs=NOISE)


def test_preempted_requests_in_steps_of_one_launch_get_the_likeliest_tokens(cache, launches, monkeypatch):
    preempted = []
    preempt = Lifecycle.preempt
    monkeypatch.setattr(
        Lifecycle, "preempt", lambda self, *of, **how: preempted.append(of) or preempt(self, *of, **how)
    )
    monkeypatch.setattr(MemoryPlan, "pages_from", lambda self, plan: 81)
    greedy = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    outputs, _ = answers(cache, greedy, [[7 + i, *range(20, 60)] * 2 for i in range(8)])
    assert preempted
    assert any(is_ahead for _, is_ahead in launches)
    monkeypatch.undo()
    check_likeliest(cache, outputs)
