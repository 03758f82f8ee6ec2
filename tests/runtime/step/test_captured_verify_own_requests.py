"""Captured verify steps of two ranks with requests of their own, played on a CPU: each runs its block, and accepts for
all.

The model is whole on both, and a thread is a rank. What they bring across is all that one hears of the other, beside
records of steps.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Queue
from threading import Barrier

import pytest
import torch

from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.ranks.records import read_step, write_step
from mllm_compile.runtime.runner_config import RunnerConfig
from mllm_compile.runtime.sampling.sampler import Sampler
from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.data_parallel import DataParallelScheduler
from mllm_compile.runtime.speculation.drafter import Speculation
from mllm_compile.runtime.speculation.factory import make_speculation
from mllm_compile.runtime.speculation.texts import TextDrafter
from mllm_compile.runtime.step.follower import FollowingStepRunner
from mllm_compile.runtime.step.runner import StepRunner
from tests.hang_guard import HANG_S
from tests.runtime.cuda_graph.played_cases import capture_on_cpu
from tests.runtime.runner_cases import DEFAULTS, VOCAB, Loop
from tests.runtime.step.test_captured_verify import FEW, MOST, Repeats, section_of, serve
from tests.runtime.step.test_grammar_rows import FakeGrammar, FakeMasks, add
from tests.runtime.step.test_verify_steps import PROMPTS, ReplayingDrafter, seen

RANKS, NUM_PAGES = 2, 100


class Exchange:
    """Brings what each rank gives to all, call by call."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor | None] = [None] * RANKS
        self._barrier = Barrier(RANKS, timeout=HANG_S)

    def gather(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self.given[rank] = x.clone()
        self._barrier.wait()
        given = [one for one in self.given if one is not None]
        self._barrier.wait()
        return given

    def abort(self) -> None:
        self._barrier.abort()


class Communicator:
    size = RANKS

    def __init__(self, rank: int, exchange: Exchange) -> None:
        self.rank, self._exchange = rank, exchange

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange.gather(self.rank, x))

    def broadcast(self, x: torch.Tensor) -> None:
        assert x.is_contiguous()
        x.copy_(self._exchange.gather(self.rank, x)[0])

    def least(self, value: int) -> int:
        return int(min(self._exchange.gather(self.rank, torch.tensor(value))))

    def choice(self, columns: int) -> None:
        return None

    def use_kernels(self, kernels, in_one_order: bool = False) -> None:
        pass


class Ranks:
    """The step runner of rank 0, beside which the other follows each step in a thread of its own."""

    def __init__(self, section) -> None:
        self.exchange, self.records, self._told = Exchange(), [], Queue()
        self.threads = ThreadPoolExecutor(RANKS)
        self.runners = self._on_each(lambda rank: self._runner(rank, section))
        self.steps = StepRunner(self.runners[0], Sampler(), self._announce)
        self.follower = FollowingStepRunner(self.runners[1], Sampler())

    def _on_each(self, run):
        def guarded(rank):
            try:
                with torch.inference_mode():
                    return run(rank)
            except BaseException:
                self.exchange.abort()  # the other must not wait for this one
                raise

        return [future.result(HANG_S) for future in [self.threads.submit(guarded, rank) for rank in range(RANKS)]]

    def _runner(self, rank: int, section) -> ModelRunner:
        runtime = replace(DEFAULTS, expert_parallel_size=RANKS, max_running_requests=4)
        config = RunnerConfig(dtype=torch.float32, runtime=runtime, num_pages=NUM_PAGES, speculative=section)
        runner = ModelRunner(config, Repeats(), meet=lambda: Communicator(rank, self.exchange))
        runner.initialize()
        with runner.on_device():
            capture_on_cpu(runner, (1, 2, 4))
            assert runner.graph_runner.check_verifies() is None
        return runner

    def _announce(self, record) -> None:
        memory = memoryview(bytearray(1 << 16))
        self.records.append(read_step(memory[: write_step(memory, record)]))
        self._told.put(self.records[-1])

    def submit(self, batch):
        def run(rank):
            return self.steps.submit(batch) if rank == 0 else self.follower.follow(self._told.get(timeout=HANG_S))

        handle = self._on_each(run)[0]
        ours, theirs = (runner.row_state.last_tokens for runner in self.runners)
        assert torch.equal(ours, theirs)
        return handle


def serve_on_ranks(requests, section=None, drafter=None, rule=None) -> Loop:
    section = section or section_of()
    ranks = Ranks(section)
    verifies = ranks.runners[0].graph_runner.verifies
    speculation = make_speculation(section, VOCAB, captured=verifies.most_requests, dp_size=RANKS)
    assert not speculation.is_on_device
    if drafter is not None:
        speculation = Speculation(
            drafter=TextDrafter(drafter), num_tokens=MOST, vocab_size=VOCAB, captured=verifies.most_requests
        )
    loop = Loop(ranks.runners[0])
    loop.steps = ranks
    limits = SchedulerConfig.of(ranks.runners[0].config.runtime, ranks.runners[0].config.cudagraph, NUM_PAGES)
    loop.scheduler = DataParallelScheduler(limits, RANKS, speculation)
    masks = FakeMasks()
    if rule is None:
        loop.requests = [loop.add(**{"max_tokens": 20} | request) for request in requests]
    else:
        loop.requests = [add(loop, one["prompt"], FakeGrammar(masks, rule), max_tokens=12) for one in requests]
    with torch.inference_mode():
        loop.run(overlap=False)
    ranks.threads.shutdown()
    return loop


@pytest.fixture(autouse=True)
def with_graphs(played):
    return played


@pytest.mark.parametrize("kind", ["right", "random"])
@pytest.mark.parametrize("params", [{}, {"presence_penalty": 0.5, **FEW}, {"logprobs": 2}], ids=str)
def test_drafts_of_ranks_with_requests_of_their_own_give_the_same_tokens(launches, kind, params):
    requests = [
        {"prompt": prompt, "temperature": 0.5 * (i % 2), "seed": i, "max_tokens": 9 + 4 * i} | params
        for i, prompt in enumerate((*PROMPTS, PROMPTS[0][:3]))
    ]
    plain = serve(requests)
    answers = {tuple(request.prompt_token_ids): request.output_token_ids for request in plain.requests}
    launches.clear()
    loop = serve_on_ranks(requests, section_of(method="suffix"), ReplayingDrafter(answers, kind))
    assert seen(loop) == seen(plain)
    decodes = [batch for batch in loop.batches if batch.has_drafts and batch.num_decodes == batch.num_requests]
    assert len(launches) >= RANKS * len(decodes) > 0, "besides those of the check at the start"
    assert kind != "right" or sum(request.num_accepted_tokens for request in loop.requests) > 8


def test_grammars_cut_drafts_of_ranks_with_requests_of_their_own(launches):
    """A grammar fails behind a drafted token, so that no draft of the step may be accepted."""

    def rule(output):
        if len(output) == 4 and failing:
            return failing.pop()
        last = output[-1] if output else 17
        return frozenset({1 + (last * 7 + len(output)) % 60, 1 + (last + 30) % 60})

    failing: list[None] = []
    requests = [{"prompt": prompt} for prompt in PROMPTS[:3]]
    plain = serve_on_ranks(requests, section_of(method="suffix"), rule=rule)
    answers = {tuple(request.prompt_token_ids): request.output_token_ids for request in plain.requests}
    failing = [None]
    drafted = serve_on_ranks(requests, section_of(method="suffix"), ReplayingDrafter(answers, "right"), rule)
    assert seen(drafted) == seen(plain)
    assert sum(request.had_broken_draft for request in drafted.requests) == 1
    assert sum(request.num_accepted_tokens for request in drafted.requests) > 8
