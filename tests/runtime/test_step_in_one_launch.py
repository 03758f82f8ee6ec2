"""Steps of decodes whose graph makes their inputs ready and chooses their tokens: the tokens that other steps give.

The graph is played by torch's operations on a CPU (decode_loop_cases.py); on a GPU: tests/gpu/test_decode_loop.py.
"""

from __future__ import annotations

import random

import pytest

from mllm_compile.runtime.sampler import Sampler
from mllm_compile.runtime.step import StepRunner
from tests.runtime.decode_loop_cases import LoopedRunner
from tests.runtime.runner_cases import VOCAB, Loop, make_runner

PLAIN = [{}, {"temperature": 0.9}, {"temperature": 1.3, "seed": 4}]
OTHERS = [
    {"temperature": 0.8, "top_k": 3},
    {"presence_penalty": 1.5, "temperature": 0.7},
    {"logit_bias": {5: 3.0}},
    {"logprobs": 2},
    {"logprobs": 3, "temperature": 1.0},
    {"min_tokens": 5, "stop_token_ids": [1, 2, 3]},
]


def serve(kinds: list[dict], looped: bool, **config):
    """Tokens and log-probabilities of requests that join and leave, and the runner."""
    runner = make_runner(**config)
    loop = Loop(runner, enable_prefix_cache=True)
    seen = LoopedRunner(runner) if looped else runner
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
    scores = [[(s.token_id, s.rank, round(s.logprob, 4)) for s in r.output_logprobs] for r in requests]
    return [request.output_token_ids for request in requests], scores, seen, loop


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kinds", [PLAIN, PLAIN + OTHERS], ids=["plain", "any"])
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


def test_a_deterministic_runner_decodes_as_it_does_everything():
    _, _, runner, _ = serve(PLAIN, looped=True, deterministic=True)
    assert runner.decodes == 0
