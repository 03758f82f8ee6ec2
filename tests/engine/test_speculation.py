"""Engines with drafts give what engines without give: answers, streams, scores, and what a server is told."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams
from mllm_compile.runtime.speculation.drafter import Speculation
from mllm_compile.runtime.speculation.texts import TextDrafter
from tests.engine.test_step_sink import served
from tests.fakes import VOCAB_SIZE, FakeStepRunner, NextToken, expected_tokens, fake_engine, hashed_token, recite

KINDS = ("right", "wrong", "random")
TEXT = "Return a new list: the items of it, in their order."


class Drafter:
    """Knows the model."""

    def __init__(self, kind: str, next_token: NextToken = hashed_token) -> None:
        self.kind, self.next_token, self.choose = kind, next_token, Random(0)

    def begin(self, prompt_token_ids: Sequence[int], salt: object) -> Guesses:
        return Guesses(self, list(prompt_token_ids))


class Guesses:
    def __init__(self, drafter: Drafter, token_ids: list[int]) -> None:
        self.drafter, self.token_ids = drafter, token_ids

    def take(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids

    def propose(self, most: int) -> list[int]:
        drafter = self.drafter
        right = expected_tokens(self.token_ids, most, drafter.next_token)
        if drafter.kind == "right":
            return right
        if drafter.kind == "wrong":
            return [(token + 1) % VOCAB_SIZE for token in right]
        return [*right[: drafter.choose.randint(0, most)], drafter.choose.randrange(VOCAB_SIZE)]

    def end(self) -> None:
        pass


def engine_of(kind: str | None, next_token: NextToken = hashed_token, fills: bool = False, **limits: Any) -> Any:
    speculation = None
    if kind is not None:
        drafter = TextDrafter(Drafter(kind, next_token))
        speculation = Speculation(drafter=drafter, num_tokens=4, vocab_size=VOCAB_SIZE, fills=fills)
    return fake_engine(FakeStepRunner(next_token=next_token), speculation=speculation, **limits)


def answers(kind: str | None, prompts: Sequence[str], params: Any, next_token: NextToken = hashed_token) -> list[Any]:
    with engine_of(kind, next_token) as engine:
        outputs = engine.generate(prompts, params)
        stats = engine.stats()
        assert stats.generated_tokens == sum(len(one.token_ids) for output in outputs for one in output.outputs)
        assert (stats.drafts > 0) is (kind is not None)
    return [
        (one.text, one.token_ids, one.finish_reason, one.stop_reason, one.cumulative_logprob, one.logprobs)
        for output in outputs
        for one in output.outputs
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_a_run_at_each_of_its_positions(kind, include):
    next_token = recite(TEXT)
    stops = [TEXT[place : place + length] for place in range(0, 30, 3) for length in (1, 3, 6)]
    params = [
        SamplingParams(
            temperature=0, max_tokens=60, stop=[stop], include_stop_str_in_output=include, logprobs=1, min_tokens=m
        )
        for stop in stops
        for m in (0, 9)
    ]
    prompts = ["say:"] * len(params)
    assert answers(kind, prompts, params, next_token) == answers(None, prompts, params, next_token)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_wins_over_what_ends_the_same_run_later(kind):
    next_token = recite(TEXT)
    params = [
        SamplingParams(temperature=0, max_tokens=length, stop=["new"], stop_token_ids=ids)
        for length in range(8, 20)
        for ids in (None, [ord("l")], [ord("w")])
    ]
    prompts = ["say:"] * len(params)
    assert answers(kind, prompts, params, next_token) == answers(None, prompts, params, next_token)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_of_many_kinds_are_the_same(kind):
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, n=3, logprobs=2),
        SamplingParams(max_tokens=11, logprobs=0, stop=["a", "th"], n=2),
        SamplingParams(max_tokens=17, prompt_logprobs=1),
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=30, frequency_penalty=0.5),
        SamplingParams(max_tokens=30, stop_token_ids=list(range(97, 101)), min_tokens=6),
    ]
    prompts = [f"prompt {index} of them" for index in range(len(params))]
    assert answers(kind, prompts, params) == answers(None, prompts, params)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_is_the_answer(kind):
    next_token = recite(TEXT)
    for stop in (None, ["list"]):
        params = SamplingParams(temperature=0, max_tokens=40, stop=stop, logprobs=1)
        with engine_of(kind, next_token) as engine:
            whole = engine.generate("say:", params)[0]
            parts = list(engine.stream("say:", params))
        assert "".join(part.text for part in parts) == whole.text
        assert [token for part in parts for token in part.token_ids] == whole.token_ids
        assert [entry for part in parts for entry in part.logprobs or []] == whole.logprobs
        assert parts[-1].finish_reason == whole.finish_reason
        if kind == "right":
            assert len(parts) < len(whole.token_ids) / 2, "several tokens come at once"


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_is_told_of_one_token_of_a_request_at_a_time(kind):
    params = SamplingParams(max_tokens=14, logprobs=1, n=2, stop_token_ids=[101])
    prompts = [[1, 2, 3], [4, 5], [6] * 9, [7], [8, 9], [10]]
    fronts = []
    for one in (None, kind):
        with engine_of(one) as engine:
            fronts.append(served(engine, prompts, params))
    plain, drafted = fronts
    assert drafted.tokens == plain.tokens
    assert {key: end.reasons for key, end in drafted.ends.items()} == {
        key: end.reasons for key, end in plain.ends.items()
    }
    assert sorted(score.token_id for _, score in drafted.scores) == sorted(score.token_id for _, score in plain.scores)
    assert not plain.drafts
    num_drafted = sum(drafted_tokens for _, drafted_tokens, _ in drafted.drafts)
    num_accepted = sum(accepted for *_, accepted in drafted.drafts)
    assert num_drafted > 0
    assert num_accepted == 0 if kind == "wrong" else 0 < num_accepted <= num_drafted


def test_figures_count_drafts_and_what_is_accepted_of_them():
    with engine_of("right") as engine:
        output = engine.generate("a prompt", SamplingParams(max_tokens=11, ignore_eos=True))[0]
        stats = engine.stats()
    # The first token by the prompt, then two drafts of 4 and the one behind each.
    assert (stats.steps, stats.drafts, stats.drafted_tokens, stats.accepted_tokens) == (3, 2, 8, 8)
    assert stats.accepted_by_position == (2, 2, 2, 2)
    assert stats.acceptance_length == 5.0
    assert "drafted tokens accepted 100.0% (5.00 tokens a draft)" in str(stats)
    assert (output.metrics.drafted_tokens, output.metrics.accepted_tokens) == (8, 8)
    assert stats.time_between_tokens.count == 10


class AnyGrammar:
    """Takes every form, which the fake runner does not heed."""

    def compile(self, params: StructuredOutputsParams) -> Any:
        return object()


def test_what_cannot_be_drafted_is_told_once(caplog):
    engine = engine_of("right", grammars=AnyGrammar(), fills=True)
    with caplog.at_level("INFO", "mllm_compile.runtime.schedule.drafts"), engine:
        params = SamplingParams(max_tokens=6, structured_outputs=StructuredOutputsParams(regex="a"))
        engine.generate(["one", "two"], params)
        assert engine.stats().drafts == 0
    assert [record.message for record in caplog.records] == [
        "no tokens are drafted for requests with structured_outputs, which a synthetic acceptance would not keep to"
    ]
