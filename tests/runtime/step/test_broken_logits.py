"""Rows whose logits are no numbers: found on the device, that request's alone, and nothing of them stays behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mllm_compile.runtime.sampling.logit_filters import filter_scores
from mllm_compile.runtime.sampling.logprobs import token_logprobs
from mllm_compile.runtime.sampling.params import NO_TOKEN, SamplingParams
from mllm_compile.runtime.schedule.pages.prefix_cache import RadixCache
from tests.runtime.runner_cases import Loop, TinyModel, make_runner
from tests.runtime.sampling.sampling_cases import make_state, random_logits
from tests.runtime.sampling.sampling_cases import sample as sample_rows

POISON = 13  # a token whose embedding is NaN in poisoned()
NEIGHBOURS = [[3, 9, 27, 20, 60], [1, 2], [7] * 11]
KINDS = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 3},
    "top_k": {"temperature": 0.8, "seed": 3, "top_k": 5},
    "top_p": {"temperature": 0.8, "seed": 3, "top_p": 0.7},
    "min_p": {"temperature": 0.8, "seed": 3, "min_p": 0.1},
    "logprobs": {"logprobs": 2},
    "penalties": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": {5: 2.0}, "min_tokens": 3, "stop_token_ids": [4]},
}
NO_NUMBERS = {
    "nan": torch.nan,
    "inf": torch.inf,
    "none finite": -torch.inf,
}


def poisoned() -> TinyModel:
    model = TinyModel()
    model.embedding[POISON] = torch.nan
    return model


def run(loop: Loop, prompts, **params):
    # Poison is no neighbour's by chance.
    params = {"logit_bias": {}, **params}
    params["logit_bias"] = params["logit_bias"] | {POISON: -100.0}
    return [loop.add(prompt, **params) for prompt in prompts]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_one_prompt_without_numbers_ends_alone_and_its_neighbours_keep_their_tokens(kind, overlap):
    alone = Loop(make_runner(poisoned()))
    expected = run(alone, NEIGHBOURS, **KINDS[kind])
    alone.run(overlap)

    loop = Loop(make_runner(poisoned()))
    broken = loop.add([5, POISON, 6], **KINDS[kind])
    beside = run(loop, NEIGHBOURS, **KINDS[kind])
    loop.run(overlap)
    assert broken.is_broken
    assert broken.output_token_ids == broken.output_logprobs == []
    assert [request.output_token_ids for request in beside] == [request.output_token_ids for request in expected]
    assert not any(request.is_broken for request in beside)


@pytest.mark.parametrize("kind", ["greedy", "sampled", "top_p", "penalties"])
def test_a_request_whose_logits_become_no_numbers_keeps_the_tokens_before(kind):
    loop = Loop(make_runner(poisoned()))
    beside = run(loop, NEIGHBOURS, **KINDS[kind])
    request = loop.add([1, 2, 3], max_tokens=8, **KINDS[kind] | {"logit_bias": {POISON: 100.0}})
    loop.run()
    assert request.output_token_ids == [POISON]
    assert request.is_broken
    assert all(len(other.output_token_ids) == 8 for other in beside)


def test_prompt_positions_without_numbers_break_the_request_too():
    class Model(TinyModel):
        def head(self, body, logits_indices):
            logits = super().head(body, logits_indices)
            return (
                torch.where(torch.arange(len(logits))[:, None] == 1, torch.nan, logits) if len(logits) > 3 else logits
            )

    loop = Loop(make_runner(Model()))
    request = loop.add([1, 2, 3, 4, 5, 6], prompt_logprobs=0)
    loop.run()
    assert request.is_broken


def test_nothing_of_it_is_in_the_prefix_cache_or_left_in_the_pages():
    model = poisoned()
    runner = make_runner(model, max_num_batched_tokens=8, num_pages=30)
    loop = Loop(runner, enable_prefix_cache=True)
    shared = [3, 1, 4, 1, 5, 9, 2, 6]  # two pages, which others had before
    first = loop.add([*shared, 7])
    loop.run()
    broken = loop.add([*shared, POISON, *range(20, 40)])  # several chunks, published one by one
    loop.run()
    assert first.num_cached_tokens == 0
    assert (broken.num_cached_tokens, broken.is_broken) == (8, True)
    again = loop.add([*shared, 7])
    loop.run()
    assert again.num_cached_tokens == 0, "what the broken one began with is not trusted either"
    assert again.output_token_ids == first.output_token_ids
    for layer in range(2):
        assert all(pages.isfinite().all() for pages in runner.token_to_kv_pool.get_pages(layer))
    loop.scheduler.flush_prefix_cache()
    stats = loop.scheduler.stats()
    assert (stats.pages_used, stats.pages_cached, stats.running) == (0, 0, 0)


def test_a_neighbour_that_shares_its_pages_keeps_them():
    loop = Loop(make_runner(poisoned()), enable_prefix_cache=True)
    shared = [3, 1, 4, 1, 5, 9, 2, 6]
    beside = loop.add([*shared, 7], max_tokens=12)
    in_flight = None
    for _ in range(3):
        in_flight = loop._turn(in_flight, overlap=True)
    broken = loop.add([*shared, POISON])
    while loop.scheduler.has_work():
        in_flight = loop._turn(in_flight, overlap=True)
    assert broken.is_broken and broken.num_cached_tokens == 8
    assert beside.output_token_ids == TinyModel().greedy([*shared, 7], 12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize("at", ["first", "last"])
def test_the_sampler_marks_exactly_the_rows_that_have_no_token(kind, value, at):
    params = SamplingParams(**{"temperature": 0.0, "seed": 1} | KINDS[kind])
    logits = random_logits(4)

    def sample():
        return sample_rows(make_state(params, params, params, params, stop_ids=(4,)), logits, [1, 2, 3, 4], [9] * 4)

    expected = sample().token_ids
    if value == "none finite":
        logits[1] = -torch.inf
    else:
        logits[1, 0 if at == "first" else -1] = NO_NUMBERS[value]
    output = sample()
    assert output.token_ids.tolist() == [NO_TOKEN if row == 1 else int(expected[row]) for row in range(4)]
    if output.logprobs is not None:
        assert output.logprobs.logprobs.isnan().tolist() == [False, True, False, False]


def test_filters_are_safe_with_rows_that_keep_nothing():
    scores = torch.stack([torch.full((256,), torch.nan), torch.randn(256)])
    for top_p in (0.5, 0.0):
        filtered = filter_scores(scores.clone(), torch.tensor([3, 3]), torch.full((2,), top_p), None)
        assert filtered[1].isfinite().any()


def test_log_probabilities_of_no_token_are_no_numbers():
    logits = random_logits(3)
    logits[0, 5] = torch.nan
    logits[1, 5] = torch.inf
    scores = token_logprobs(logits, torch.tensor([NO_TOKEN, NO_TOKEN, 4]), 2)
    assert scores.logprobs.isnan().tolist() == [True, True, False]
    assert scores.top_logprobs.isnan().all(1).tolist() == [True, True, False]


def test_a_forgotten_prefix_is_found_by_nobody_and_its_pages_come_back():
    cache = RadixCache(2)
    locked, _ = cache.extend(None, [1, 2, 3, 4, 5, 6], np.array([10, 11, 12], dtype=np.int32))
    cache.unlock(locked)
    node, _ = cache.match_prefix(np.array([1, 2, 3, 4]))
    cache.lock(node)  # 10 and 11
    other, _ = cache.extend(None, [7, 8], np.array([13], dtype=np.int32))
    cache.unlock(other)
    assert cache.forget([1, 2, 9, 9]).tolist() == [12]
    assert cache.match_prefix(np.array([1, 2, 3, 4]))[1].tolist() == []
    assert cache.match_prefix(np.array([7, 8]))[1].tolist() == [13]
    again, _ = cache.extend(None, [1, 2], np.array([14], dtype=np.int32))  # somebody computes it anew
    cache.unlock(again)
    cache.unlock(node)
    assert sorted(cache.evict(9).tolist()) == [10, 11, 12, 13, 14]
    assert cache.num_pages == 0
    assert cache.forget([1, 2]).size == cache.forget([1]).size == 0
