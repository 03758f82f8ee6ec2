"""Decodes are dealt among the steps that stages have in flight: evenly, in turns, and each to the same group again."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.schedule.batch_builder import RunningDecodes
from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduler import Scheduler
from mllm_compile.runtime.schedule.stage_turns import StageTurns


def request_of(row: int) -> Request:
    request = Request(request_id=f"r{row}", prompt_token_ids=[1, 2, 3], params=SamplingParams(max_tokens=50))
    request.row = row
    return request


def rows_of(decodes: RunningDecodes) -> set[int]:
    return set(decodes.rows.tolist())


def test_groups_take_turns_and_stay_the_same_objects():
    turns, in_flight = StageTurns(2, 10), np.zeros(10, dtype=np.int32)
    decodes = RunningDecodes.of([request_of(row) for row in range(1, 8)])
    first, second, third = (turns.of_step(decodes, in_flight) for _ in range(3))
    assert sorted(map(len, (rows_of(first), rows_of(second)))) == [3, 4]
    assert rows_of(first) | rows_of(second) == set(range(1, 8))
    assert third is first


def test_one_request_is_in_every_step_and_none_is_where_all_are_under_way():
    turns, in_flight = StageTurns(2, 10), np.ones(10, dtype=np.int32)
    alone = RunningDecodes.of([request_of(1)])
    assert turns.of_step(alone, in_flight) is alone
    assert not turns.of_step(RunningDecodes.of([request_of(1), request_of(2)]), in_flight).requests


@pytest.mark.parametrize("num_stages", [2, 3])
def test_requests_that_come_and_go_leave_groups_alike_and_no_request_waits(num_stages):
    drawn = random.Random(num_stages)
    turns, in_flight = StageTurns(num_stages, 40), np.zeros(40, dtype=np.int32)
    rows, last_seen, under_way = set(range(1, 9)), dict.fromkeys(range(1, 9), 0), list[set[int]]()
    decodes = RunningDecodes.of([request_of(row) for row in sorted(rows)])
    for step in range(400):
        if drawn.random() < 0.1:
            rows ^= {drawn.randrange(1, 40)}
            decodes = RunningDecodes.of([request_of(row) for row in sorted(rows)])
        last_seen = {row: last_seen.get(row, step) for row in rows}
        found = rows_of(turns.of_step(decodes, in_flight))
        assert found <= rows and not any(in_flight[row] for row in found if len(rows) > 1)
        under_way.append(found)
        in_flight[list(found)] += 1
        last_seen |= dict.fromkeys(found, step)
        if len(under_way) == num_stages:
            in_flight[list(under_way.pop(0))] -= 1
        assert all(step - seen <= 4 * num_stages for seen in last_seen.values())


def test_a_schedule_of_two_stages_has_two_steps_of_different_requests_in_flight():
    limits = {"max_running_requests": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "page_size": 4}
    scheduler = Scheduler(SchedulerConfig(**limits, num_pages=100, pipeline_parallel_size=2))
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    requests = [Request(request_id=f"r{index}", prompt_token_ids=[1, 2, 3], params=params) for index in range(4)]
    for request in requests:
        scheduler.add(request)
    prompts = scheduler.schedule()
    assert prompts is not None and prompts.num_requests == 4
    assert scheduler.schedule() is None, "all wait for their first tokens"
    scheduler.update(prompts, np.full(4, 7))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None and second is not None
    assert not set(first.rows.tolist()) & set(second.rows.tolist())
    in_flight = [first, second]
    while in_flight:
        batch = in_flight.pop(0)
        scheduler.update(batch, np.full(batch.num_requests, 7))
        if (planned := scheduler.schedule()) is not None:
            in_flight.append(planned)
    assert all(request.output_token_ids == [7] * 6 for request in requests)
