"""A draft model changes no token; one that is the model itself is always right, whatever happens to its requests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.runtime.runner_cases import VOCAB, Loop, TinyModel, make_runner
from tests.runtime.step.test_verify_steps import PARAMS, PROMPTS, seen

SAME, OTHER = 0, 1  # seeds of a draft model's weights; the model's is 0


def run(requests: Sequence[dict], seed: int | None, most: int = 3, prefix_cache: bool = False, **runtime) -> Loop:
    """The loop after these requests; seed: of the draft model; None: none drafts."""
    draft_model = None if seed is None else TinyModel(seed)
    loop = Loop(make_runner(draft_model=draft_model, **runtime), prefix_cache, num_drafted=most)
    loop.requests = [loop.add(**{"max_tokens": 12} | request) for request in requests]
    loop.run()
    return loop


def compare(requests: Sequence[dict], seed: int, most: int = 3, **options) -> Loop:
    """The loop with drafts, after a look that one without gives the same tokens."""
    drafted = run(requests, seed, most, **options)
    assert seen(drafted) == seen(run(requests, None, **options))
    assert any(batch.has_drafts for batch in drafted.batches)
    return drafted


def counts(loop: Loop) -> tuple[int, int]:
    """(drafted, accepted) tokens."""
    return tuple(sum(getattr(r, f"num_{n}_tokens") for r in loop.requests) for n in ("drafted", "accepted"))


@pytest.mark.parametrize("most", [1, 3, 7])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9}, {"temperature": 1.2, "seed": 5, "top_k": 20}])
def test_the_model_itself_drafts_every_token_greedy_and_sampled(params, most):
    loop = compare([{"prompt": prompt} | params for prompt in PROMPTS], SAME, most)
    drafted, accepted = counts(loop)
    assert drafted == accepted > 0
    assert len(loop.batches) == 1 + -(-11 // (most + 1))


@pytest.mark.parametrize("seed", [SAME, OTHER])
@pytest.mark.parametrize("name", PARAMS)
def test_every_parameter_gives_the_same_tokens(name, seed):
    loop = compare([{"prompt": prompt} | PARAMS[name] for prompt in PROMPTS], seed)
    drafted, accepted = counts(loop)
    # A stop token ends a run of accepted ones.
    assert accepted < drafted if seed == OTHER else accepted == drafted or "stop" in name or "min_tokens" in name


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9}])
@pytest.mark.parametrize("seed", [SAME, OTHER])
def test_preempted_requests_in_chunks_behind_cached_prefixes_get_the_same_tokens(seed, params):
    requests = [{"prompt": [*range(9), *prompt], "max_tokens": 20} | params for prompt in PROMPTS * 2]
    limits = {"num_pages": 26, "max_num_batched_tokens": 14, "prefix_cache": True}
    loop = compare(requests, seed, **limits)
    assert any(request.num_preemptions for request in loop.requests)
    assert any(request.num_cached_tokens for request in loop.requests)
    drafted, accepted = counts(loop)
    assert accepted == drafted if seed == SAME else accepted < drafted


def test_draws_agree_more_often_than_they_would_with_noise_of_their_own():
    """Of a draft model that differs a little: the same seed and position give both the same noise."""

    def accepted(is_shared: bool) -> int:
        model = TinyModel()
        noise = torch.randn(model.head_weight.shape, generator=torch.Generator().manual_seed(1))
        model.head_weight = model.head_weight + 0.1 * noise
        loop = Loop(make_runner(draft_model=model), num_drafted=1)
        if not is_shared:
            sample = loop.steps.drafter._sampler
            loop.steps.drafter._sampler = lambda logits, state, rows, flags, positions, **options: sample(
                logits, state, rows, flags, positions + 1000, **options
            )
        loop.requests = [loop.add(prompt, temperature=5.0, seed=i, max_tokens=40) for i, prompt in enumerate(PROMPTS)]
        loop.run()
        return counts(loop)[1]

    assert accepted(True) > 2 * accepted(False)


def test_a_prefix_hit_brings_the_draft_models_keys():
    loop = Loop(make_runner(draft_model=TinyModel(SAME)), True, num_drafted=3)
    prompt = [int(token) for token in torch.randint(0, VOCAB, (30,), generator=torch.Generator().manual_seed(3))]
    for _ in range(2):
        request = loop.add(prompt, max_tokens=13)
        loop.run()
        assert (request.num_drafted_tokens, request.num_accepted_tokens) == (9, 9)
    assert request.num_cached_tokens == 28


@pytest.mark.parametrize("chunk", [64, 12])
def test_keys_of_an_answer_that_had_no_drafts_are_made_when_it_is_a_prefix(chunk, monkeypatch):
    """Where the prompt leaves the pass no room for them, the first pass of a draft makes them."""
    loop = Loop(make_runner(draft_model=TinyModel(SAME), max_num_batched_tokens=chunk), True, num_drafted=3)
    with monkeypatch.context() as without_drafts:
        without_drafts.setattr(loop.scheduler.drafts, "may_draft", lambda request: False)
        first = loop.add(PROMPTS[0], max_tokens=24)
        loop.run()
    prompt = [*PROMPTS[0], *first.output_token_ids, 5, 7, 9]
    for _ in range(2):  # the second reads what the first was to make
        request = loop.add(prompt, max_tokens=13)
        loop.run()
        assert request.num_cached_tokens >= 20
        assert request.num_drafted_tokens == request.num_accepted_tokens > 0


def test_requests_that_had_no_room_for_drafts_catch_up():
    """Four decodes fill a step; when two have ended, the draft model lacks many tokens of the others."""
    requests = [{"prompt": prompt, "max_tokens": 10 + 14 * (i % 2)} for i, prompt in enumerate(PROMPTS)]
    loop = compare(requests, SAME, max_num_batched_tokens=4, max_running_requests=4)
    drafted, accepted = counts(loop)
    assert drafted == accepted > 0


class _NoNumbers(TinyModel):
    """Gives NaN once a request has token 7 in it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding[7] = torch.nan


def test_a_draft_model_without_numbers_costs_drafts_alone():
    expected = [TinyModel().greedy(prompt, 12) for prompt in PROMPTS]
    loop = Loop(make_runner(draft_model=_NoNumbers()), True, num_drafted=3)
    requests = [loop.add(prompt, max_tokens=12) for prompt in PROMPTS]
    loop.run()
    assert [request.output_token_ids for request in requests] == expected
    with_7 = [7 in prompt for prompt in PROMPTS]
    assert any(with_7)
    for request, has_7 in zip(requests, with_7, strict=True):
        assert (request.num_drafted_tokens == 0) is has_7
        assert request.num_preemptions == 0
    drafter = loop.runner.drafter
    buffers = [buffer for layer in range(2) for buffer in drafter.token_to_kv_pool.get_kv_buffer(layer)]
    assert not any(buffer.isnan().any() for buffer in buffers), "its pages were cleared"


def test_a_draft_model_out_of_memory_costs_drafts_alone(monkeypatch, caplog):
    loop = Loop(make_runner(draft_model=TinyModel(SAME)), num_drafted=3)
    forward, calls = loop.runner.drafter.forward, []

    def fail_at_times(batch):
        calls.append(batch)
        if len(calls) % 3 == 2:
            raise torch.OutOfMemoryError("none left")
        return forward(batch)

    monkeypatch.setattr(loop.runner.drafter, "forward", fail_at_times)
    requests = [loop.add(prompt, max_tokens=30) for prompt in PROMPTS]
    loop.run()
    assert [request.output_token_ids for request in requests] == [TinyModel().greedy(p, 30) for p in PROMPTS]
    assert sum(request.num_accepted_tokens for request in requests) > 0
    assert "the draft model ran out of memory" in caplog.text


def test_an_ended_request_is_forgotten():
    loop = run([{"prompt": prompt} for prompt in PROMPTS], SAME)
    assert not loop.steps.drafter._computed


def test_pages_hold_the_keys_of_both_models():
    plain, drafting = make_runner(), make_runner(draft_model=TinyModel(OTHER))
    assert drafting.kv_bytes_per_page == 2 * plain.kv_bytes_per_page, "which the count of pages is made of"
    assert drafting.drafter.token_to_kv_pool.num_pages == drafting.token_to_kv_pool.num_pages
    assert drafting.drafter.req_to_token_pool is drafting.req_to_token_pool
