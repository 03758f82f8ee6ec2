"""Depths by cost: drafts where they pay, in a world whose times and acceptance are known; never much slower without.

A step takes its time on the device, and the host's, where that is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from mllm_compile.runtime.config_sections import CAPTURED_BY_COST, MOST_BY_COST, most_drafted_by_cost
from mllm_compile.runtime.runner_config import MOST_VERIFIED
from mllm_compile.runtime.schedule.batch_builder import Drafted, RunningDecodes, build_batch
from mllm_compile.runtime.schedule.draft_depths import DraftDepths
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import NO_DRAFTS, ScheduledBatch, TokenRuns
from mllm_compile.runtime.schedule.trial_budget import TrialBudget
from mllm_compile.runtime.speculation.acceptance_rates import AcceptanceRates
from mllm_compile.runtime.speculation.step_times import StepTimes
from tests.runtime.schedule.scheduler_simulation import make_request

NO_PAGES = (np.empty(0, np.int32),) * 3


@dataclass
class World:
    """Decodes that go on for ever.

    Attributes:
        ms_of: a step's time on the device, by its tokens.
        rates: of each request, how likely each drafted token is accepted; may be changed between runs.
        made: of each request, how often there is a draft.
        host_ms: the host's time between two steps, where the device waits for it.
        on_device: the device drafts, in steps of one launch that are planned while one runs.
    """

    ms_of: Callable[[int], float]
    rates: np.ndarray
    made: np.ndarray
    host_ms: float = 0.0
    on_device: bool = False
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    drafted: int = 0  # tokens

    def __post_init__(self) -> None:
        count = len(self.rates)
        self.captured = {k: count for k in CAPTURED_BY_COST if self.on_device and count * (1 + k) <= MOST_VERIFIED}
        self.depths = DraftDepths(count + 1, MOST_BY_COST, most_drafted_by_cost(count), self.captured)
        self.requests = [make_request(str(index), [5, 6]) for index in range(count)]
        for row, request in enumerate(self.requests, start=1):
            request.row = row
            request.output_token_ids.append(7)
        self.decodes = RunningDecodes.of(self.requests)
        self.admitted: list[Request] = list(self.requests)
        self.in_flight: tuple[ScheduledBatch, TokenRuns | None, float] | None = None
        self.step_id = 0

    def run(self, num_steps: int) -> float:
        """Tokens a ms, in units of what they are without drafts."""
        tokens, ms, count = 0, 0.0, len(self.requests)
        for _ in range(num_steps):
            taken = self._step()
            tokens, ms = tokens + taken[0], ms + taken[1]
        return tokens / ms / (count / self.ms_of(count))

    def _step(self) -> tuple[int, float]:
        """Plans a step as a scheduler does; its tokens and its time."""
        depths, count = self.depths, len(self.requests)
        self._choose()
        drafts_before = self.in_flight is not None and self.in_flight[0].has_drafts
        if self.in_flight is not None and (drafts_before != depths.is_on if self.on_device else depths.is_on):
            self._finish()
            self._choose()
        is_ahead = self.in_flight is not None
        most = np.array([depths.of(request) for request in self.requests])
        lengths = np.where(self.generator.random(count) < self.made, most, 0)
        places = np.arange(MOST_BY_COST)
        is_right = self.generator.random((count, MOST_BY_COST)) < self.rates[:, None]
        accepted = (is_right & (places < lengths[:, None])).cumprod(axis=1).sum(axis=1)
        batch = self._batch(most if self.on_device else lengths)
        self.drafted += int(lengths.sum())
        depths.planned(batch, is_ahead)
        padded = min((k for k in self.captured if k >= lengths.max()), default=0) if batch.has_drafts else 0
        ms = self.ms_of(count * (1 + padded) if padded else batch.num_tokens) + (0 if is_ahead else self.host_ms)
        self._finish()
        runs = None
        if batch.has_drafts:
            runs = TokenRuns(np.zeros((count, MOST_BY_COST + 1)), accepted + 1, np.zeros(count, bool), lengths)
        self.in_flight = batch, runs, ms
        return int(accepted.sum()) + count, ms

    def _choose(self) -> None:
        depths, count = self.depths, len(self.requests)
        if not depths.is_due(self.in_flight is not None):
            return
        if self.captured or self.on_device:
            depths.choose_alike(self.requests, count, [*self.captured], on_device=self.on_device)
        else:
            depths.choose(self.requests, count, MOST_BY_COST)

    def _batch(self, lengths: np.ndarray) -> ScheduledBatch:
        drafted = {}
        if lengths.any():
            drafted["drafted"] = Drafted.of(self.requests, [[8] * n for n in lengths.tolist()])
            if self.on_device:
                num_new = (1 + lengths).astype(np.int32)
                drafted["drafted"] = Drafted(NO_DRAFTS, num_new, np.full(len(lengths), -1, np.int32))
        prefix_lens = np.zeros(len(self.requests), np.int32)
        admitted, self.admitted = self.admitted, []
        self.step_id += 1
        return build_batch(
            self.step_id - 1, self.decodes, prefix_lens, [], NO_PAGES, np.empty(0, np.int32), admitted, **drafted
        )

    def _finish(self) -> None:
        if self.in_flight is not None:
            batch, runs, ms = self.in_flight
            self.depths.took(batch, ms)
            self.depths.checked(batch, runs)
            self.in_flight = None


def world(count: int, rate: float, ms_of: Callable[[int], float], made: float = 1.0, **options: float) -> World:
    return World(ms_of, np.full(count, rate), np.full(count, made), **options)


def weights_bound(num_tokens: int) -> float:
    """A GPU: weights are read once, and from 170 tokens on products take longer."""
    return max(4.0, 4.0 * num_tokens / 170) + 0.01 * num_tokens


def like_a_cpu(num_tokens: int) -> float:
    return 10.0 + 2.5 * num_tokens


WORLDS = [weights_bound, like_a_cpu]


@pytest.mark.parametrize("ms_of", WORLDS)
@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("made", [1.0, 0.1, 0.0])
@pytest.mark.parametrize("on_device", [False, True])
def test_drafts_in_vain_cost_at_most_a_fiftieth(ms_of, count, made, on_device):
    tried = world(count, 0.0, ms_of, made, host_ms=0.3, on_device=on_device)
    assert tried.run(100) > 0.95, "while it learns"
    assert tried.run(300) > 0.98


@pytest.mark.parametrize("host_ms", [0.3, 0.8])
@pytest.mark.parametrize("on_device", [False, True])
def test_tries_in_vain_are_bounded_by_what_the_waits_around_them_cost_too(host_ms, on_device):
    """A small model on a GPU: a verify step costs little, and the host's part of one that is not planned ahead much.
    Answers of 160 tokens follow each other, and each new one is hoped to be fair."""
    tried = world(1, 0.0, lambda num_tokens: 0.55 if num_tokens == 1 else 0.57, host_ms=host_ms, on_device=on_device)
    paces = []
    for _ in range(8):
        tried.admitted = list(tried.requests)
        paces.append(tried.run(160))
    assert paces[0] > 0.93, "while it learns"
    assert sum(paces[1:]) / 7 > 0.98
    tried.rates[:] = 0.9
    tried.run(400)
    assert tried.run(100) > (1.5 if host_ms < 0.5 or on_device else 0.98)


def test_one_long_wait_stops_tries_for_a_while_alone():
    budget = TrialBudget()
    budget.pass_step(1.0, True, 900.0, 1.0)
    assert not budget.is_left
    for _ in range(150):
        budget.pass_step(1.0, False, 1.0, 1.0)
    assert budget.is_left


@pytest.mark.parametrize(("right", "is_left"), [(0, False), (1, False), (6, True)])
def test_drafts_that_are_seen_to_be_right_are_tried_though_a_try_was_slow(right, is_left):
    depths = DraftDepths(3, MOST_BY_COST, 8, {})
    depths._budget.pass_step(1.0, True, 900.0, 1.0)
    rows = np.array([1, 2])
    for _ in range(2):
        depths.learn(rows, np.array([6, 0]), np.array([right, 0]))
    assert depths._budget.is_left is is_left


@pytest.mark.parametrize("ms_of", WORLDS)
@pytest.mark.parametrize("rate", [0.0, 0.9])
@pytest.mark.parametrize("on_device", [False, True])
def test_many_requests_get_no_drafts_and_lose_nothing(ms_of, rate, on_device):
    tried = world(256, rate, ms_of, host_ms=0.3, on_device=on_device)
    tried.run(60)
    drafted = tried.drafted
    assert tried.run(140) > 0.995
    assert tried.drafted - drafted < 140, "next to none for 35,840 tokens"


@pytest.mark.parametrize(
    ("ms_of", "count", "rate", "least"),
    [
        # The least is 0.85 of the best fixed depth, which is found by trying all of them.
        *((weights_bound, count, rate, 0.85) for count, rate in ((1, 0.9), (1, 0.6), (8, 0.9), (8, 0.6))),
        *((like_a_cpu, count, rate, 0.85) for count, rate in ((1, 0.9), (1, 0.6), (8, 0.9))),
        # Here each request's own rate has to be found, of which half is noise.
        (weights_bound, 64, 0.8, 0.75),
    ],
)
def test_drafts_that_pay_are_about_as_deep_as_the_best_fixed_ones(ms_of, count, rate, least):
    def of_fixed_depth(most: int) -> float:
        tokens = sum(rate**place for place in range(most + 1))
        return tokens * ms_of(count) / (ms_of(count * (most + 1)) + (0.3 if most else 0))

    tried = world(count, rate, ms_of, host_ms=0.3)
    tried.run(100)
    best = max(map(of_fixed_depth, range(MOST_BY_COST + 1)))
    assert tried.run(200) > max(least * best, 0.98)


@pytest.mark.parametrize(("count", "rate"), [(1, 0.9), (1, 0.5), (8, 0.9), (8, 0.6), (64, 0.8)])
@pytest.mark.parametrize("ms_of", WORLDS)
def test_drafts_of_the_device_are_as_deep_as_the_best_captured_ones(ms_of, count, rate):
    def of_fixed_depth(most: int) -> float:
        return sum(rate**place for place in range(most + 1)) * ms_of(count) / ms_of(count * (most + 1))

    tried = world(count, rate, ms_of, host_ms=0.3, on_device=True)
    tried.run(100)
    best = max(of_fixed_depth(most) for most in (0, *CAPTURED_BY_COST) if count * (1 + most) <= MOST_VERIFIED)
    assert tried.run(200) > max(0.93 * best, 0.98)


def test_requests_whose_drafts_are_never_accepted_get_few():
    tried = world(8, 0.95, weights_bound)
    tried.rates[2:] = 0.0
    tried.run(100)
    lengths = np.zeros(8)
    for _ in range(100):
        tried._step()
        lengths += [tried.depths.of(request) for request in tried.requests]
    assert lengths[2:].max() < 0.2 * lengths[:2].min()


def test_a_text_that_begins_to_repeat_itself_gets_drafts_again():
    tried = world(1, 0.0, weights_bound)
    tried.run(300)
    tried.rates[:] = 0.95
    tried.run(100)
    assert tried.run(100) > 4


def test_a_new_request_in_a_row_is_tried_like_any():
    tried = world(1, 0.0, weights_bound)
    tried.run(100)
    before = tried.drafted
    tried.run(8)
    in_vain = tried.drafted - before
    tried.admitted = list(tried.requests)
    tried.run(12)
    assert tried.drafted - before - in_vain > in_vain


def test_a_step_that_took_long_once_is_tried_again():
    times = StepTimes(waits=True)
    for ms in (4.0, 4.0):
        times.learn(3, None, ms)
    times.learn(3, 4, 900.0)
    assert times.of(3).by_drafted == {}, "something may have been loaded for it"
    times.learn(3, 4, 4.2)
    known = times.of(3)
    assert (known.plain_ms, known.by_drafted, known.most_drafted) == (4.0, {4: 4.2}, 8)
    for _ in range(1100):
        times.learn(2, None, 1.0)
    assert times.of(3).plain_ms is None, "old times are forgotten"


def test_times_of_more_requests_tell_what_drafts_of_fewer_cost_until_these_are_known():
    times = StepTimes(waits=True)
    for _ in range(2):
        for drafted, ms in ((None, 10.0), (8, 11.0), (24, 12.0), (56, 15.0)):
            times.learn(8, drafted, ms)
    known = times.of(6)
    assert (known.plain_ms, times.plain_ms(6)) == (10.0, 10.0)
    assert known.by_drafted == {6: 11.0, 16: 12.0, 32: 15.0}, "1, 3 and 7 tokens for each"
    assert all(map(known.knows, (6, 18, 42))) and not known.knows(90)
    for _ in range(2):
        times.learn(6, None, 5.0)
        times.learn(6, 18, 5.5)
    assert times.of(6).by_drafted == {6: 5.5, 16: 5.5, 32: 7.5}, "as much longer, but for what is known"
    assert times.of(12).plain_ms is times.plain_ms(12) is None, "fewer requests tell nothing of more"


def test_a_wait_for_the_host_is_no_time_of_a_token():
    """Drafts of eight requests are mostly right, but a step with few drafted tokens does not pay for its wait."""
    tried = world(8, 0.9, weights_bound, host_ms=0.9)
    tried.run(100)
    assert tried.run(200) > 3


@pytest.mark.parametrize(("waits", "expected"), [(True, [10.0, 12.0, 12.0]), (False, [10.0, 12.0, 14.0])])
def test_one_known_time_behind_a_wait_says_nothing_of_more_tokens(waits, expected):
    times = StepTimes(waits=waits)
    for _ in range(2):
        times.learn(3, None, 10.0)
        times.learn(3, 4, 12.0)
    assert times.of(3).verify_ms(np.array([0, 4, 8])).tolist() == expected


@pytest.mark.parametrize(("rate", "made"), [(0.9, 1.0), (0.7, 0.7), (0.5, 0.3)])
def test_drafts_of_the_host_are_as_deep_as_the_best_captured_ones(rate, made):
    """A captured step is padded to as many drafted tokens of each request, so the longest draft says its time."""

    def of_fixed_depth(most: int) -> float:
        tokens = 1 + made * sum(rate**place for place in range(1, most + 1))
        return tokens * weights_bound(32) / (weights_bound(32 * (most + 1)) + 0.9)

    tried = world(32, rate, weights_bound, made, host_ms=0.9)
    tried.captured.update({1: 32, 3: 32, 7: 32})
    tried.run(150)
    best = max(map(of_fixed_depth, tried.captured))
    assert tried.run(200) > max(0.9 * best, 0.98)


def test_times_between_known_ones_and_beyond_them_are_on_lines():
    times = StepTimes(waits=True)
    for _ in range(2):
        for drafted, ms in ((None, 10.0), (0, 11.0), (4, 13.0), (8, 12.0)):
            times.learn(3, drafted, ms)
    known = times.of(3)
    assert known.verify_ms(np.array([0, 2, 4, 8, 16])).tolist() == [11.0, 12.0, 13.0, 13.0, 15.0]


def test_places_of_a_draft_have_rates_of_their_own():
    rates, row = AcceptanceRates(2, 3), np.array([1])
    for step in range(200):
        rates.pass_step()
        rates.learn(row, np.array([3]), np.array([1 if step % 4 else 0]))
    likely, made = rates.expected(row)
    assert likely[0, 0] > 0.5 > 0.1 > likely[0, 1]
    assert made[0] > 0.9
