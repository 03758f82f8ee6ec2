"""The scheduler when decodes need pages and none are free: one request gives its own back and comes again."""

from __future__ import annotations

import pytest

from mllm_compile.runtime.schedule.request import Request, RequestStatus
from tests.runtime.schedule.scheduler_simulation import FREE, Simulation, answer, make_config, make_request, prompt_of


def crowd(*, steps_ahead: int = 0, priorities: tuple[int, ...] = (0, 0, 0), **changes: int) -> Simulation:
    """Three requests, a, b and c, whose answers do not fit at once."""
    simulation = Simulation(make_config(num_pages=14, max_num_batched_tokens=64, **changes), steps_ahead)
    for i, (name, priority) in enumerate(zip("abc", priorities, strict=True)):
        simulation.add(make_request(name, prompt_of(9, first=3 * i), priority=priority, max_tokens=20, **FREE))
    return simulation


@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
@pytest.mark.parametrize("enable_prefix_cache", [True, False])
def test_a_preempted_request_gets_the_same_tokens(steps_ahead: int, enable_prefix_cache: bool) -> None:
    simulation = crowd(steps_ahead=steps_ahead, enable_prefix_cache=enable_prefix_cache)
    simulation.run()
    assert simulation.scheduler.stats().preemptions > 0
    simulation.check_answers()
    simulation.check_all_returned()


@pytest.mark.parametrize(
    ("priorities", "first"), [((0, 0, 0), "c"), ((1, 0, 0), "a"), ((0, 5, 5), "c"), ((2, 3, 1), "b")]
)
def test_the_youngest_of_the_least_urgent_is_preempted_first(priorities: tuple[int, ...], first: str) -> None:
    simulation = crowd(priorities=priorities)
    while not simulation.scheduler.stats().preemptions:
        simulation.step()
    assert [request.request_id for request in simulation.requests if request.num_preemptions] == [first]
    simulation.run()
    simulation.check_answers()


def preempt_in_flight() -> tuple[Simulation, Request]:
    """Run until a request is preempted while a step of its is in flight."""
    simulation = crowd(steps_ahead=1)
    while not any(request.num_preemptions for request in simulation.requests):
        simulation.plan()
        if len(simulation.in_flight) > 1 and not any(request.num_preemptions for request in simulation.requests):
            simulation.collect()
    request = next(request for request in simulation.requests if request.num_preemptions)
    assert any(request in batch.requests for batch, _ in simulation.in_flight)
    return simulation, request


def test_the_token_in_flight_of_a_preempted_request_is_kept_and_recomputed() -> None:
    simulation, request = preempt_in_flight()
    assert request.status is RequestStatus.WAITING and request.row > 0
    before = list(request.output_token_ids)
    while request.row > 0:
        simulation.collect()
    assert request.output_token_ids[:-1] == before
    kept = request.all_token_ids
    while request.status is RequestStatus.WAITING:
        batch = simulation.step()
    assert request in batch.admitted
    row = batch.requests.index(request)
    assert batch.sample_mask[row]
    assert batch.seq_lens[row] == len(kept)
    simulation.run()
    simulation.check_answers()


def test_a_preempted_request_can_end_with_its_token_in_flight_or_be_aborted() -> None:
    simulation, request = preempt_in_flight()
    batch, tokens = simulation.in_flight[0]
    if request not in batch.requests:
        simulation.collect()
        batch, tokens = simulation.in_flight[0]
    request.stop_ids = request.stop_ids | {int(tokens[batch.requests.index(request)])}
    finished = simulation.collect()
    assert finished == [request] and request.finish_reason == "stop"

    simulation_2, aborted = preempt_in_flight()
    assert simulation_2.scheduler.abort(aborted)
    for each in (simulation, simulation_2):
        each.run()
        each.check_all_returned()
    assert aborted.row == request.row == -1


def test_a_more_urgent_prompt_takes_its_pages_from_the_decodes_that_ate_them() -> None:
    simulation = Simulation(make_config(num_pages=11, max_num_batched_tokens=3, max_running_requests=3))
    calm = simulation.add(make_request("calm", prompt_of(2), priority=1, max_tokens=30, **FREE))
    simulation.step()
    urgent = simulation.add(make_request("urgent", prompt_of(30), max_tokens=8, **FREE))
    while not urgent.is_finished:
        assert urgent in simulation.step().requests
    assert (calm.num_preemptions, urgent.num_preemptions) == (1, 0)
    simulation.run()
    simulation.check_answers()


def test_answers_do_not_depend_on_chunks_overlap_or_the_crowd() -> None:
    outputs = set()
    for budget in (4, 7, 64):
        for steps_ahead in (0, 1):
            for num_pages in (17, 100):
                limits = {"max_num_batched_tokens": budget, "num_pages": num_pages}
                simulation = Simulation(make_config(**limits), steps_ahead)
                for i in range(8):
                    simulation.add(make_request(str(i), prompt_of(5 + 3 * i), max_tokens=12))
                simulation.run()
                outputs.add(tuple(tuple(request.output_token_ids) for request in simulation.requests))
    expected = tuple(tuple(answer(request, request.max_new_tokens)[0]) for request in simulation.requests)
    assert outputs == {expected}
