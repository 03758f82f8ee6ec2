"""Steps of decodes whose graph makes their inputs ready and chooses their tokens: the tokens that other steps give.

The graph is played by torch's operations on a CPU (decode_loop_cases.py); on a GPU: tests/gpu/test_decode_loop.py.
"""

from __future__ import annotations

import random

import pytest
import torch

from mllm_compile.runtime.sampling.sampler import Sampler
from mllm_compile.runtime.step.runner import StepRunner
from tests.runtime.runner_cases import VOCAB, Loop, TinyModel, make_runner
from tests.runtime.step.decode_loop_cases import OTHERS, PLAIN, LoopedRunner

POISON = 13
ANY = [*PLAIN, *OTHERS, {"min_tokens": 5, "stop_token_ids": [1, 2, 3]}]


def serve(kinds: list[dict], looped: bool, most: int = 100, **config):
    """Tokens and log-probabilities of requests that join and leave, and the runner."""
    runner = make_runner(**config)
    loop = Loop(runner, enable_prefix_cache=True)
    seen = LoopedRunner(runner, most) if looped else runner
    loop.steps = StepRunner(seen, Sampler())
    rng = random.Random(0)
    requests, in_flight = [], None
    for step in range(120):
        if step % 5 == 0:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
            requests.append(loop.add(prompt, max_tokens=rng.randrange(1, 30), **rng.choice(kinds)))
        if loop.scheduler.has_work():
            in_flight = loop._turn(in_flight, overlap=True)
    while in_flight is not None:
        in_flight = loop._turn(in_flight, overlap=True)
    scores = [
        [(s.token_id, s.rank, round(s.logprob, 4), s.of_all is None) for s in r.output_logprobs] for r in requests
    ]
    return [request.output_token_ids for request in requests], scores, seen, loop


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kinds", [PLAIN, ANY], ids=["plain", "any"])
def test_requests_that_join_and_leave_get_the_same_tokens(kinds, page_size):
    tokens, scores, runner, loop = serve(kinds, looped=True, page_size=page_size)
    assert runner.decodes > 60
    assert any(batch.num_decodes < batch.num_requests for batch in loop.batches), "steps of both kinds"
    assert (tokens, scores) == serve(kinds, looped=False, page_size=page_size)[:2]


def test_preempted_requests_get_the_same_tokens():
    small = {"num_pages": 14, "page_size": 4}
    tokens, _, runner, loop = serve(PLAIN, looped=True, **small)
    assert loop.scheduler.stats().preemptions > 0
    assert runner.decodes > 30
    assert tokens == serve(PLAIN, looped=False, **small)[0]


def test_more_decodes_than_a_graph_holds_are_run_as_other_steps_are_and_give_the_same_tokens():
    tokens, _, runner, loop = serve(PLAIN, looped=True, most=2)
    decodes = [batch.num_requests for batch in loop.batches if batch.num_decodes == batch.num_requests]
    assert 0 < runner.decodes == sum(count <= 2 for count in decodes) < len(decodes)
    assert tokens == serve(PLAIN, looped=False)[0]


@pytest.mark.parametrize("limits", [{}, {"temperature": 0.9, "seed": 3}, {"logprobs": 1}, {"logprobs": -1}])
def test_a_row_that_becomes_no_number_ends_alone(limits):
    """A token whose embedding is NaN is what one of three says first."""

    def serve_three(poison: bool):
        model = TinyModel()
        if poison:
            model.embedding[POISON] = torch.nan
        runner = make_runner(model)
        loop = Loop(runner)
        loop.steps = StepRunner(LoopedRunner(runner, 100), Sampler())
        others = [loop.add(prompt, logit_bias={POISON: -100.0}, **limits) for prompt in ([3, 9, 27], [1, 2])]
        says_it = loop.add([4, 4], allowed_token_ids=[POISON], max_tokens=8, **limits)
        loop.run()
        return others, says_it

    expected, whole = serve_three(poison=False)
    others, broken = serve_three(poison=True)
    assert whole.output_token_ids == [POISON] * 8
    assert (broken.output_token_ids, broken.is_broken) == ([POISON], True)
    assert [request.output_token_ids for request in others] == [request.output_token_ids for request in expected]


def test_a_plain_row_that_becomes_no_number_in_a_captured_decode_ends_alone():
    """Its keys are made NaN between two steps; all rows are chosen by the graph."""

    def serve_three(is_broken: bool):
        runner = make_runner()
        loop = Loop(runner)
        looped = LoopedRunner(runner, 100)
        loop.steps = StepRunner(looped, Sampler())
        requests = [loop.add([5 + i, 9], max_tokens=20, **kind) for i, kind in enumerate(PLAIN)]
        in_flight = None
        for step in range(30):
            if is_broken and step == 6:
                slot = int(loop.scheduler.pages.table[requests[1].row, 0]) * runner.config.runtime.page_size
                runner.token_to_kv_pool.get_kv_buffer(0)[0][slot] = torch.nan
            in_flight = loop._turn(in_flight, overlap=True)
        assert looped.decodes > 15
        return requests

    whole, requests = serve_three(is_broken=False), serve_three(is_broken=True)
    assert [request.is_broken for request in requests] == [False, True, False]
    assert 1 < len(requests[1].output_token_ids) < 20
    for request, expected in zip(requests, whole, strict=True):
        assert request.output_token_ids == expected.output_token_ids[: len(request.output_token_ids)]
