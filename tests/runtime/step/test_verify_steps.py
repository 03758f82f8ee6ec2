"""Steps with drafts give every request the tokens that it gets without, whatever is drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
import torch

from mllm_compile.runtime.config_sections import SpeculativeSection
from mllm_compile.runtime.speculation.drafter import Speculation
from mllm_compile.runtime.speculation.factory import make_speculation
from mllm_compile.runtime.speculation.texts import TextDrafter
from tests.runtime.runner_cases import VOCAB, Loop, TinyModel, make_runner

PROMPTS = [[3, 9, 27, 20, 60], [1, 2], [7] * 21, [5, 4, 3, 2, 1, 0, 59, 58, 57, 33, 12]]
KINDS = ("right", "wrong", "random")


@dataclass
class ReplayingDrafter:
    """Knows the answers by their prompts: drafts them, others, or any part of them with anything behind."""

    answers: dict[tuple[int, ...], list[int]]
    kind: str
    choose: Random = field(default_factory=lambda: Random(0))

    def begin(self, prompt_token_ids: Sequence[int], salt: object) -> _Replay:
        return _Replay(self, self.answers.get(tuple(prompt_token_ids), []))


@dataclass
class _Replay:
    drafter: ReplayingDrafter
    answer: list[int]
    count: int = 0

    def take(self, token_ids: Sequence[int]) -> None:
        self.count += len(token_ids)

    def propose(self, most: int) -> list[int]:
        right = self.answer[self.count : self.count + most]
        if self.drafter.kind == "right":
            return right
        if self.drafter.kind == "wrong":
            return [(token + 1) % VOCAB for token in right]
        choose = self.drafter.choose
        return right[: choose.randint(0, most)] + [choose.randrange(-1, VOCAB + 1) for _ in range(choose.randint(0, 3))]

    def end(self) -> None:
        pass


def run(
    requests: Sequence[dict],
    drafter: object = None,
    most: int = 3,
    overlap: bool = True,
    prefix_cache: bool = False,
    **runtime,
) -> Loop:
    speculation = None
    if drafter is not None:
        speculation = Speculation(drafter=drafter, num_tokens=most, vocab_size=VOCAB)
    loop = Loop(make_runner(TinyModel(), **runtime), prefix_cache, speculation)
    loop.requests = [loop.add(**{"max_tokens": 12} | request) for request in requests]
    loop.run(overlap)
    return loop


def seen(loop: Loop) -> list[tuple]:
    return [
        (
            request.output_token_ids,
            request.finish_reason,
            request.stop_reason,
            [s.token_id for s in request.output_logprobs],
        )
        for request in loop.requests
    ]


def compare(requests: Sequence[dict], kind: str, most: int = 3, **options) -> tuple[Loop, Loop]:
    """The loops without and with drafts, after a look that all tokens are the same."""
    plain = run(requests, **options)
    answers = {tuple(request.prompt_token_ids): request.output_token_ids for request in plain.requests}
    drafted = run(requests, TextDrafter(ReplayingDrafter(answers, kind)), most, **options)
    assert seen(drafted) == seen(plain)
    for one, other in zip(drafted.requests, plain.requests, strict=True):
        ours, theirs = ([s.logprob for s in request.output_logprobs] for request in (one, other))
        assert ours == pytest.approx(theirs, abs=1e-4)
    return plain, drafted


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [1, 3, 7])
def test_greedy_tokens_are_the_same_and_right_drafts_save_steps(kind, most, overlap):
    plain, drafted = compare([{"prompt": prompt} for prompt in PROMPTS], kind, most, overlap=overlap)
    model = TinyModel()
    assert [request.output_token_ids for request in plain.requests] == [model.greedy(p, 12) for p in PROMPTS]
    assert any(batch.has_drafts for batch in drafted.batches)
    if kind == "right":
        assert len(drafted.batches) == 1 + -(-11 // (most + 1))


SAMPLED = {"temperature": 0.9, "seed": 11}
# Tokens that may not follow each other, and some that may not follow any two.
PHRASES = (
    *((first, last) for first in range(0, VOCAB, 2) for last in range(0, VOCAB, 4)),
    *((first, second, 1) for first in range(0, VOCAB, 9) for second in range(VOCAB)),
)
PARAMS = {
    "temperature": SAMPLED,
    "the engine's seed": {"temperature": 1.3},
    "top_k": SAMPLED | {"top_k": 7},
    "top_p": SAMPLED | {"top_p": 0.7},
    "min_p": SAMPLED | {"min_p": 0.1},
    "logit_bias": SAMPLED | {"logit_bias": {5: 3.0, 9: -2.0}},
    "greedy with bias": {"logit_bias": {5: 3.0, 9: -2.0}},
    "min_tokens": SAMPLED | {"min_tokens": 6, "stop_token_ids": list(range(0, VOCAB, 3))},
    "stop tokens": {"stop_token_ids": list(range(0, VOCAB, 5))},
    "allowed_token_ids": SAMPLED | {"allowed_token_ids": list(range(0, VOCAB, 2))},
    "logprobs": SAMPLED | {"logprobs": 3},
    "all logprobs": {"logprobs": -1},
    "processed logprobs": SAMPLED | {"logprobs": 1, "logprobs_mode": "processed_logprobs", "presence_penalty": 0.5},
    "kept tokens": SAMPLED | {"logprobs": 0, "top_p": 0.8, "return_sampling_mask": True},
    "prompt_logprobs": SAMPLED | {"prompt_logprobs": 2, "logprobs": 0},
    "bad_words": SAMPLED | {"bad_words": ["some"], "bad_phrases": PHRASES},
    "greedy with penalties": {"frequency_penalty": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    "penalties": SAMPLED | {"frequency_penalty": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.3},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PARAMS)
def test_every_parameter_gives_the_same_tokens_and_scores(name, kind):
    plain, drafted = compare([{"prompt": prompt} | PARAMS[name] for prompt in PROMPTS], kind)
    assert any(batch.has_drafts for batch in drafted.batches)
    if name == "all logprobs":
        for one, other in zip(drafted.requests, plain.requests, strict=True):
            for ours, theirs in zip(one.output_logprobs, other.output_logprobs, strict=True):
                np.testing.assert_allclose(ours.of_all, theirs.of_all, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_all_kinds_in_one_batch_give_the_same_tokens(kind):
    prompts = PROMPTS * 4
    requests = [
        {"prompt": [*p, i]} | params for i, (p, params) in enumerate(zip(prompts, PARAMS.values(), strict=False))
    ]
    compare(requests, kind, max_running_requests=16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [8, 11, 20])
def test_prompts_in_chunks_beside_drafts_give_the_same_tokens(kind, budget):
    _, drafted = compare([{"prompt": prompt} for prompt in PROMPTS], kind, max_num_batched_tokens=budget)
    assert all(batch.num_tokens <= budget for batch in drafted.batches)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_drafts_across_the_ends_of_pages_give_the_same_tokens(kind, page_size):
    compare([{"prompt": prompt, "max_tokens": 20} for prompt in PROMPTS], kind, 7, page_size=page_size, num_pages=200)


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_requests_give_the_same_tokens(kind):
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18]]
    requests = [{"prompt": prompt, "max_tokens": 14, "temperature": 0.7} for prompt in prompts]
    _, drafted = compare(requests, kind, num_pages=9)
    assert drafted.scheduler.stats().preemptions > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_cut_at_each_of_its_positions(kind):
    """By max_tokens, and by a stop token."""
    answer = TinyModel().greedy(PROMPTS[0], 12)
    for length in range(1, 13):
        compare([{"prompt": PROMPTS[0], "max_tokens": length}], kind, 5)
    for stop in dict.fromkeys(answer):
        compare([{"prompt": PROMPTS[0], "stop_token_ids": [stop]}], kind, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_hit_on_an_answer_that_was_drafted_gives_the_same_tokens(kind):
    """Keys of drafted tokens that were not accepted are not in the cache."""
    model, prompt = TinyModel(), [3, 9, 27, 20, 60]
    answer = model.greedy(prompt, 30)
    drafter = TextDrafter(ReplayingDrafter({tuple(prompt): answer}, kind))
    loop = Loop(make_runner(model), True, Speculation(drafter=drafter, num_tokens=5, vocab_size=VOCAB))
    loop.add(prompt, max_tokens=15)
    loop.run()
    again = loop.add([*prompt, *answer[:14], 8], max_tokens=8)
    loop.run()
    assert again.num_cached_tokens == 16
    assert again.output_token_ids == model.greedy([*prompt, *answer[:14], 8], 8)


@pytest.mark.parametrize("most", [1, 3])
def test_deterministic_steps_of_any_rows_give_the_same_tokens(most):
    requests = [{"prompt": prompt, "logprobs": 0, "prompt_logprobs": 0} | SAMPLED for prompt in PROMPTS]
    options = {"deterministic": True, "any_rows": True, "max_num_batched_tokens": 80}
    _, drafted = compare(requests, "random", most, **options)
    assert any(batch.has_drafts for batch in drafted.batches)


@pytest.mark.parametrize("kind", KINDS)
def test_deterministic_steps_give_the_same_tokens_and_bits(kind):
    requests = [{"prompt": prompt, "logprobs": 0} | SAMPLED for prompt in PROMPTS]
    plain, drafted = compare(requests, kind, deterministic=True, max_num_batched_tokens=24)
    assert any(batch.has_drafts for batch in drafted.batches)
    for one, other in zip(drafted.requests, plain.requests, strict=True):
        assert [s.logprob for s in one.output_logprobs] == [s.logprob for s in other.output_logprobs]


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_our_drafters_give_the_same_tokens_and_are_right_at_times(method):
    few = {"allowed_token_ids": [5, 6], "max_tokens": 30}  # so that it repeats itself
    requests = [{"prompt": [5, 6, 7, 8] * 6} | few, {"prompt": [1, 2, 3]} | few]
    plain = run(requests)
    section = SpeculativeSection(method=method, num_speculative_tokens=4)
    speculation = make_speculation(section, VOCAB)
    assert speculation is not None
    drafted = run(requests, speculation.drafter, 4)
    assert seen(drafted) == seen(plain)
    assert sum(request.num_accepted_tokens for request in drafted.requests) > 5
    assert len(drafted.batches) < len(plain.batches)


class _BrokenToken(TinyModel):
    """Token 60 has an embedding of NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding[60] = torch.nan


class _Drafts60:
    def begin(self, prompt_token_ids: Sequence[int], salt: object) -> _Drafts60:
        return self

    def take(self, token_ids: Sequence[int]) -> None:
        pass

    def propose(self, most: int) -> list[int]:
        return [60] * most

    def end(self) -> None:
        pass


def test_a_drafted_token_without_numbers_costs_no_token_and_no_neighbour():
    model = _BrokenToken()
    prompts = [prompt for prompt in PROMPTS if 60 not in prompt]
    expected = [model.greedy(prompt, 12) for prompt in prompts]
    assert all(60 not in answer for answer in expected)
    loop = Loop(make_runner(model), True, Speculation(drafter=TextDrafter(_Drafts60()), num_tokens=3, vocab_size=VOCAB))
    requests = [loop.add(prompt, max_tokens=12) for prompt in prompts]
    loop.run()
    assert [request.output_token_ids for request in requests] == expected
    assert [request.num_preemptions for request in requests] == [1] * len(prompts)
    buffers = [buffer for layer in range(2) for buffer in loop.runner.token_to_kv_pool.get_kv_buffer(layer)]
    assert not any(buffer.isnan().any() for buffer in buffers), "the pages were cleared"


@pytest.mark.parametrize("kind", [None, "right", "wrong"])
def test_a_request_without_a_next_token_ends_as_without_drafts(kind):
    """It is forced to token 60, whose own logits are no numbers; the draft goes on behind it."""
    model, prompt = _BrokenToken(), PROMPTS[1]
    answer = model.greedy(prompt, 4)
    stop = {"min_tokens": 2, "stop_token_ids": [token for token in range(VOCAB) if token != 60]}
    drafter = TextDrafter(ReplayingDrafter({tuple(prompt): [60, *answer]}, kind or ""))
    speculation = Speculation(drafter=drafter, num_tokens=6, vocab_size=VOCAB) if kind else None
    loop = Loop(make_runner(model), False, speculation)
    request, neighbour = loop.add(prompt, max_tokens=12, **stop), loop.add(PROMPTS[2], max_tokens=12)
    loop.run()
    assert (request.output_token_ids, request.finish_reason, request.is_broken) == ([60], "abort", True)
    assert neighbour.output_token_ids == model.greedy(PROMPTS[2], 12)
