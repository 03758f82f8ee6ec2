"""Requests that go wrong on a GPU hurt only themselves: hostile parameters, and logits that become NaN while served."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.engine.start.assemble import assemble
from mllm_compile.engine.start.parts import EngineParts
from mllm_compile.process.timeline import Timeline
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from tests.tiny_model import TINY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

PROMPTS = ["Return a new list containing", "The for statement is used to iterate over", "x = 1\n" * 20, "A"]
VICTIM = "If the file cannot be opened,"
PLAIN: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "seed": 5}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8},
    "top_k and top_p": {"temperature": 0.8, "top_k": 20, "top_p": 0.95},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "penalties": {"temperature": 0, "repetition_penalty": 1.2},
    "bad words": {"temperature": 0, "bad_words": ["list", "for the"]},
}


class Poison:
    """A step runner that makes a request's oldest value NaN before its step number `at`."""

    def __init__(self, parts: EngineParts) -> None:
        self._steps: Any = parts.step_runner
        self.at: int | None = None
        self._count = 0

    def submit(self, batch: ScheduledBatch):
        victim = next((r for r in batch.requests if r.cache_salt == ("victim",)), None)
        if victim is not None and self.at is not None:
            self._count += 1
            if self._count == self.at:
                runner = self._steps._runner
                with torch.inference_mode():
                    slot = runner.req_to_token_pool.req_to_token[victim.row, 0].long()
                    for layer in range(len(runner.model.layers)):
                        runner.token_to_kv_pool.get_kv_buffer(layer)[1].index_fill_(0, slot[None], torch.nan)
                self.at, self._count = None, 0
        return self._steps.submit(batch)


@pytest.fixture(scope="module", params=["eager", "inductor"])
def served(request, tmp_path_factory) -> Iterator[tuple[Engine, Poison]]:
    sections = {
        "model": {"path": str(TINY), "dtype": "bfloat16"},
        "compile": {"backend": request.param},
        "runtime": {"device": "cuda"},
        "cache": {"dir": str(tmp_path_factory.mktemp("cache"))},
    }
    parts = assemble(EngineConfig.from_dict(sections), Timeline())
    poison = Poison(parts)
    with Engine.from_parts(replace(parts, step_runner=poison)) as engine:
        yield engine, poison


def answers(engine: Engine, kind: str, victims_tokens: int = 40):
    """The victim's answer first."""
    engine.flush_prefix_cache()
    prompts = [{"prompt": VICTIM, "cache_salt": "victim"}, *PROMPTS]
    params = SamplingParams(**PLAIN, **KINDS[kind])
    return engine.generate(prompts, [replace(params, max_tokens=victims_tokens), *[params] * len(PROMPTS)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_whose_logits_become_nan_ends_alone(served, kind):
    engine, poison = served
    whole = answers(engine, kind)
    assert [answer.finish_reason for answer in whole] == ["length"] * 5
    before = engine.stats().broken_logits
    poison.at = 12
    victim, *others = answers(engine, kind)
    assert victim.finish_reason == "error"
    assert "hold NaN or inf" in victim.error
    count = len(victim.token_ids)
    assert 5 < count < 38
    assert victim.token_ids == whole[0].token_ids[:count]
    assert engine.stats().broken_logits == before + 1
    # A request that ends by its length leaves after the same step: the step of its missing token, and one in flight.
    expected = answers(engine, kind, victims_tokens=count + 2)
    assert [answer.token_ids for answer in others] == [answer.token_ids for answer in expected[1:]]
    again = answers(engine, kind)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in whole], "no NaN stayed behind"


@pytest.mark.parametrize(
    "limits",
    [
        {"top_p": 1e-46},
        {"top_p": 1e-300, "top_k": 10**5000},
        {"temperature": 1e-5},
        {"temperature": 1e-300},
        {"min_p": 5e-324},
        {"min_p": 1.0, "top_p": 1e-40, "top_k": 1},
        {"repetition_penalty": 0.01, "frequency_penalty": -2, "presence_penalty": 2},
        {"logit_bias": {"5": 1e300, "7": float("-inf")}, "seed": 2**63 - 1},
    ],
    ids=lambda limits: "-".join(limits),
)
def test_the_least_and_the_most_that_a_request_may_ask_for_hurt_nobody(served, limits):
    engine, _ = served
    others = SamplingParams(**PLAIN, **KINDS["top_k and top_p"])  # so that all steps are of the same kind

    def beside(first: SamplingParams):
        engine.flush_prefix_cache()
        answers = engine.generate([VICTIM, *PROMPTS], [first, *[others] * len(PROMPTS)])
        assert [answer.finish_reason for answer in answers] == ["length"] * 5
        return [answer.token_ids for answer in answers[1:]]

    hostile = SamplingParams(**(PLAIN | {"temperature": 0.9} | limits))
    assert beside(hostile) == beside(others)
