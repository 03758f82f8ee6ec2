"""Captured verify steps of two ranks, played on a CPU: the one that follows does as rank 0 does, and knows no request.

The model is whole on both; what rank 0 broadcasts is all that the other hears beside records of steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
import torch

from mllm_compile.runtime.ranks.records import read_step, write_step
from mllm_compile.runtime.sampling.sampler import Sampler
from mllm_compile.runtime.speculation.drafter import Speculation
from mllm_compile.runtime.speculation.factory import make_speculation
from mllm_compile.runtime.speculation.texts import TextDrafter
from mllm_compile.runtime.step.follower import FollowingStepRunner
from mllm_compile.runtime.step.runner import StepRunner
from tests.runtime.cuda_graph.played_cases import capture_on_cpu
from tests.runtime.runner_cases import VOCAB, Loop, make_runner
from tests.runtime.step.test_captured_states import Stateful
from tests.runtime.step.test_captured_verify import FEW, MOST, Repeats, ahead_steps, section_of, serve
from tests.runtime.step.test_grammar_rows import FakeGrammar, FakeMasks, add
from tests.runtime.step.test_verify_steps import PROMPTS, ReplayingDrafter, seen


class Communicator:
    """Hands what rank 0 broadcasts on to rank 1, in order."""

    size = 2

    def __init__(self, rank: int, sent: deque[torch.Tensor] | None = None) -> None:
        self.rank, self.sent = rank, deque() if sent is None else sent
        self.is_serving = False

    def broadcast(self, x: torch.Tensor) -> None:
        assert x.is_contiguous()
        if self.is_serving and self.rank == 0:
            self.sent.append(x.clone())
        elif self.is_serving:
            part = self.sent.popleft()
            assert part.shape == x.shape and part.dtype == x.dtype
            x.copy_(part)

    def choice(self, columns: int) -> None:
        return None

    def least(self, value: int) -> int:
        return value


class Ranks:
    """The step runner of rank 0; each step is followed at once, and leaves both ranks alike."""

    def __init__(self, model, section) -> None:
        self.records, self.runners = [], []
        first = Communicator(0)
        self.communicators = first, Communicator(1, first.sent)
        for communicator in self.communicators:
            runner = make_runner(model())
            runner.communicator = communicator
            runner.config = replace(runner.config, speculative=section)
            capture_on_cpu(runner, (1, 2, 4, 8))
            runner.graph_runner.check_verifies()
            assert runner.graph_runner.verifies is not None
            self.runners.append(runner)
        self.steps = StepRunner(self.runners[0], Sampler(), self._announce)
        self.follower = FollowingStepRunner(self.runners[1], Sampler())
        for communicator in self.communicators:
            communicator.is_serving = True

    def _announce(self, record) -> None:
        memory = memoryview(bytearray(1 << 16))
        self.records.append(read_step(memory[: write_step(memory, record)]))

    def submit(self, batch):
        handle = self.steps.submit(batch)
        self.follower.follow(self.records[-1])
        assert not self.communicators[0].sent
        self._compare(batch)
        return handle

    def _compare(self, batch) -> None:
        ours, theirs = self.runners
        assert torch.equal(ours.row_state.last_tokens, theirs.row_state.last_tokens)
        for layer in range(len(ours.model.layers)):
            for one, other in zip(
                ours.token_to_kv_pool.get_pages(layer), theirs.token_to_kv_pool.get_pages(layer), strict=True
            ):
                assert torch.equal(one[1:], other[1:])
        for layer in ours.model.state_layers:
            states = (runner.state_pool.get_state(layer.state_id)[batch.rows.tolist()] for runner in self.runners)
            assert torch.equal(*states)


def serve_on_ranks(requests, model=Repeats, section=None, drafter=None, rule=None) -> tuple[Loop, Ranks]:
    section = section or section_of()
    ranks = Ranks(model, section)
    captured = ranks.runners[0].graph_runner.verifies.most_requests
    speculation = make_speculation(section, VOCAB, captured=captured)
    if drafter is not None:
        speculation = Speculation(drafter=TextDrafter(drafter), num_tokens=MOST, vocab_size=VOCAB, captured=captured)
    loop = Loop(ranks.runners[0], False, speculation)
    loop.steps = ranks
    if rule is None:
        loop.requests = [loop.add(**{"max_tokens": 20} | request) for request in requests]
    else:
        masks = FakeMasks()
        loop.requests = [add(loop, one["prompt"], FakeGrammar(masks, rule), max_tokens=12) for one in requests]
    with torch.inference_mode():
        loop.run()
    return loop, ranks


PARAMS = ({}, {"temperature": 0.7, "seed": 3}, {"presence_penalty": 0.5, **FEW}, {"logprobs": 1})


@pytest.mark.parametrize(("model", "params"), [*((Repeats, one) for one in PARAMS), (Stateful, PARAMS[2])])
def test_the_device_drafts_alike_on_all_ranks(played, model, params):
    requests = [{"prompt": prompt * 2, "max_tokens": 12 + 4 * i} | params for i, prompt in enumerate(PROMPTS)]
    loop, _ = serve_on_ranks(requests, model)
    assert seen(loop) == seen(serve(requests, model=model))
    assert ahead_steps(loop) > 3
    assert model is Stateful or sum(request.num_accepted_tokens for request in loop.requests) > 3


@pytest.mark.parametrize("kind", ["right", "random"])
def test_drafts_of_the_host_are_accepted_alike_on_all_ranks(played, kind):
    requests = [{"prompt": prompt, "temperature": 0.5 * (i % 2)} for i, prompt in enumerate(PROMPTS)]
    plain = serve(requests)
    answers = {tuple(request.prompt_token_ids): request.output_token_ids for request in plain.requests}
    loop, ranks = serve_on_ranks(requests, section=section_of(method="suffix"), drafter=ReplayingDrafter(answers, kind))
    assert [request.output_token_ids for request in loop.requests] == [
        request.output_token_ids[:20] for request in plain.requests
    ]
    assert any(record.batch.has_drafts for record in ranks.records)


def test_grammars_cut_drafts_on_all_ranks(played):
    """A grammar fails behind a drafted token, so that no draft of the step may be accepted."""

    def rule(output):
        if len(output) == 4 and failing:
            return failing.pop()
        last = output[-1] if output else 17
        return frozenset({1 + (last * 7 + len(output)) % 60, 1 + (last + 30) % 60})

    failing: list[None] = []
    requests = [{"prompt": prompt} for prompt in PROMPTS[:2]]
    plain, _ = serve_on_ranks(requests, section=section_of(method="suffix"), rule=rule)
    answers = {tuple(request.prompt_token_ids): request.output_token_ids for request in plain.requests}
    failing = [None]
    drafter = ReplayingDrafter(answers, "right")
    drafted, _ = serve_on_ranks(requests, section=section_of(method="suffix"), drafter=drafter, rule=rule)
    assert seen(drafted) == seen(plain)
    assert sum(request.had_broken_draft for request in drafted.requests) == 1


def test_steps_in_which_ranks_accept_other_drafts_are_left_out_at_the_start(played, monkeypatch):
    runner = Ranks(Repeats, section_of()).runners[1]
    monkeypatch.setattr(Communicator, "broadcast", lambda communicator, x: x.add_(1))
    assert "ranks accept others of 1 requests' drafts" in runner.graph_runner.check_verifies()
    assert runner.graph_runner.verifies is None
