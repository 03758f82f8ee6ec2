"""allowed_token_ids and bad_words: tokens that a row may not have next, in crowds, in overlap, after preemptions."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.runtime.sampling.params import NO_TOKEN, NONE_ALLOWED, SamplingParams
from mllm_compile.runtime.sampling.state import SamplingFlags
from mllm_compile.runtime.sampling.token_rules import AllowedTokens, ForbiddenPhrases
from mllm_compile.runtime.schedule.request import Request
from tests.runtime.runner_cases import VOCAB, Loop, TinyModel, make_runner
from tests.runtime.sampling.sampling_cases import PROMPT, make_state, random_logits, sample

CPU = torch.device("cpu")
PROMPTS = [[3, 9, 27, 20, 60], [1, 2], [7] * 11]


def forbidden(phrases: ForbiddenPhrases, row: int) -> list[int]:
    logits = torch.zeros(1, 20)
    phrases.forbid(logits, torch.tensor([row]))
    return logits[0].isinf().nonzero().flatten().tolist()


def test_the_end_of_a_phrase_is_forbidden_where_the_output_ends_in_its_beginning():
    phrases = ForbiddenPhrases(4, CPU)
    phrases.set(1, [[5], [6, 7], [6, 7, 8], [1, 6, 7, 9]])
    seen = [forbidden(phrases, 1)]
    for token in (6, 7, 1, 6, 7, 5):
        phrases.record(torch.tensor([1]), torch.tensor([token]))
        seen.append(forbidden(phrases, 1))
    assert seen == [[5], [5, 7], [5, 8], [5], [5, 7], [5, 8, 9], [5]]
    assert forbidden(phrases, 2) == []


def test_longer_and_more_phrases_of_another_slot_change_nothing():
    phrases = ForbiddenPhrases(4, CPU)
    phrases.set(1, [[6, 7]], [1, 2, 6])
    phrases.set(2, [[1, 2, 3, 4], [9], [10], [11], [12]], [1, 2, 3])
    assert forbidden(phrases, 1) == [7]
    assert forbidden(phrases, 2) == [4, 9, 10, 11, 12]
    phrases.set(2, ())
    assert forbidden(phrases, 2) == []
    assert forbidden(phrases, 1) == [7]


def test_a_slot_may_have_its_own_tokens_alone_and_all_again_when_it_is_cleared():
    allowed = AllowedTokens(6, 8, CPU)
    for row in range(1, 5):
        allowed.set(row, [row, 7])
    allowed.clear(2)
    allowed.set(5, [0])
    logits = torch.zeros(6, 8)
    logits[3, 1] = torch.nan
    allowed.forbid_others(logits, torch.arange(6))
    finite = [row.isfinite().nonzero().flatten().tolist() for row in logits]
    assert finite == [list(range(8)), [1, 7], list(range(8)), [3, 7], [4, 7], [0]]
    assert logits[3, 1].isnan(), "what is no number is not hidden"


@pytest.mark.parametrize("params", [{"allowed_token_ids": [4, 9]}, {"bad_words": ["x"]}])
def test_neighbours_keep_their_logits_and_nobody_pays_once_it_is_gone(params):
    logits = random_logits(2)
    plain = SamplingParams(seed=3)
    state = make_state(plain, SamplingParams(temperature=0, **params))
    assert state.flags.changes_logits and not state.flags.chooses_plainly
    tokens = sample(state, logits, [1, 2], [9, 9]).token_ids
    assert tokens[0] == sample(make_state(plain), logits[:1], [1], [9]).token_ids[0]
    state.clear(2)
    assert state.flags == SamplingFlags(all_greedy=False, any_greedy=False)


def add(loop: Loop, prompt, phrases=(), **params) -> Request:
    """Queue a request whose bad_words have these tokens."""
    limits = {"temperature": 0.0, "max_tokens": 8} | params
    if phrases:
        limits["bad_words"] = ["of these tokens"]
    request = Request(
        request_id="r", prompt_token_ids=list(prompt), params=SamplingParams(**limits), bad_phrases=phrases
    )
    loop.scheduler.add(request)
    return request


def greedy_without(model: TinyModel, prompt, phrases, count: int) -> list[int]:
    """As one would write it down, a token at a time on the host."""
    output: list[int] = []
    for _ in range(count):
        logits = model.logits([*prompt, *output])[-1].clone()
        for *before, last in phrases:
            if len(before) <= len(output) and output[len(output) - len(before) :] == before:
                logits[last] = -torch.inf
        output.append(int(logits.argmax()))
    return output


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("config", [{}, {"max_num_batched_tokens": 8}, {"deterministic": True}])
def test_a_served_request_has_no_bad_word_also_where_steps_overlap(overlap, config):
    model = TinyModel()
    plain = [model.greedy(prompt, 8) for prompt in PROMPTS]
    # The very pairs and triples that it would say, and a token by itself; a pair that begins in the prompt counts not.
    phrases = [
        (tuple(out[1:3]), tuple(out[3:6]), (out[7],), (prompt[-1], out[0]))
        for prompt, out in zip(PROMPTS, plain, strict=True)
    ]
    loop = Loop(make_runner(model, **config))
    requests = [add(loop, prompt, words) for prompt, words in zip(PROMPTS, phrases, strict=True)]
    beside = add(loop, PROMPTS[0])
    loop.run(overlap)
    for request, prompt, words, unrestricted in zip(requests, PROMPTS, phrases, plain, strict=True):
        assert request.output_token_ids == greedy_without(model, prompt, words, 8)
        assert request.output_token_ids != unrestricted
    assert beside.output_token_ids == plain[0]


def test_a_preempted_request_remembers_what_it_said():
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18]]
    model = TinyModel()
    words = [tuple(tuple(out[i : i + 3]) for i in range(11)) for out in (model.greedy(p, 14) for p in prompts)]
    loop = Loop(make_runner(model, num_pages=9))
    requests = [add(loop, prompt, phrases, max_tokens=14) for prompt, phrases in zip(prompts, words, strict=True)]
    loop.run()
    assert loop.scheduler.stats().preemptions > 0
    expected = [greedy_without(model, prompt, phrases, 14) for prompt, phrases in zip(prompts, words, strict=True)]
    assert [request.output_token_ids for request in requests] == expected


@pytest.mark.parametrize("limits", [{}, {"temperature": 1.5, "seed": 4}, {"temperature": 1.5, "seed": 4, "top_p": 0.9}])
def test_an_output_has_allowed_tokens_alone(limits):
    model = TinyModel()
    loop = Loop(make_runner(model))
    request = add(loop, PROMPTS[0], allowed_token_ids=[5, 11, 40, VOCAB - 1], max_tokens=12, **limits)
    beside = [add(loop, prompt) for prompt in PROMPTS]
    loop.run()
    assert set(request.output_token_ids) <= {5, 11, 40, VOCAB - 1}
    assert len(request.output_token_ids) == 12
    assert [other.output_token_ids for other in beside] == [model.greedy(prompt, 8) for prompt in PROMPTS]


def test_a_request_that_forbids_all_that_it_allows_ends_alone():
    loop, prompt = Loop(make_runner(), enable_prefix_cache=True), list(range(1, 14))
    add(loop, prompt)
    loop.run()
    for _ in range(2):  # what it had from the cache stays there for others
        request = add(loop, prompt, ((5,), (6,)), allowed_token_ids=[5, 6])
        beside = add(loop, PROMPTS[1])
        loop.run()
        assert request.forbids_all and not request.is_broken
        assert (request.finish_reason, request.output_token_ids) == ("abort", [])
        assert request.num_cached_tokens == 12
        assert beside.output_token_ids == TinyModel().greedy(PROMPTS[1], 8)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_nan_and_inf_are_told_from_forbidden_tokens(temperature):
    params = SamplingParams(temperature=temperature, allowed_token_ids=[1], min_tokens=2, max_tokens=4)
    state = make_state(*[params] * 4, stop_ids=(1,), vocab_size=2)
    logits = torch.tensor([[1.0, 2.0], [1.0, torch.nan], [torch.inf, 1.0], [-torch.inf] * 2])
    tokens = sample(state, logits, [1, 2, 3, 4], [len(PROMPT)] * 4).token_ids
    assert tokens.tolist() == [NONE_ALLOWED, NO_TOKEN, NO_TOKEN, NO_TOKEN]
