"""One rule of the scheduler a test; scheduler_simulation.py runs its batches on a model that notices any wrong page."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mllm_compile.runtime.errors import ConfigError, RequestError
from mllm_compile.runtime.schedule.request import RequestStatus
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.schedule.scheduler import Scheduler
from tests.runtime.schedule.scheduler_simulation import (
    EOS,
    FREE,
    STOP,
    Simulation,
    make_config,
    make_request,
    prompt_of,
)


def ids(batch: ScheduledBatch | None) -> list[str]:
    return [request.request_id for request in batch.requests] if batch is not None else []


def run_alone(scheduler: Scheduler, tokens: list[int]) -> None:
    """Without overlap, give each step's rows these tokens in turn."""
    for token in tokens:
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.update(batch, np.full(batch.num_requests, token, dtype=np.int64))


# --- the order of decodes ---------------------------------------------------------------------------------------------


def test_decodes_come_longest_first_also_when_one_joins_and_one_ends() -> None:
    scheduler = Scheduler(make_config(max_num_batched_tokens=64))
    for name, length, max_tokens in (("short", 3, 9), ("long", 30, 4), ("middle", 12, 9)):
        scheduler.add(make_request(name, prompt_of(length), max_tokens=max_tokens, **FREE))
    run_alone(scheduler, [5])  # the prompts
    orders = []
    for step in range(5):
        if step == 1:
            scheduler.add(make_request("joins", prompt_of(20), max_tokens=9, **FREE))
        batch = scheduler.schedule()
        assert batch is not None
        orders.append(ids(batch)[: batch.num_decodes])
        scheduler.update(batch, np.full(batch.num_requests, 5, dtype=np.int64))
    assert orders == [
        ["long", "middle", "short"],
        ["long", "middle", "short"],
        ["long", "joins", "middle", "short"],
        ["joins", "middle", "short"],
        ["joins", "middle", "short"],
    ]


def test_decodes_of_an_adapter_are_neighbours_and_the_adapter_with_the_longest_comes_first() -> None:
    scheduler = Scheduler(make_config(max_num_batched_tokens=64))
    for name, length, slot in (("b", 9, 1), ("none", 15, -1), ("long b", 20, 1), ("a", 11, 0)):
        request = make_request(name, prompt_of(length), max_tokens=9, **FREE)
        request.adapter_slot = slot
        scheduler.add(request)
    run_alone(scheduler, [5])  # the prompts
    batch = scheduler.schedule()
    assert ids(batch) == ["long b", "b", "none", "a"]
    assert batch is not None
    assert batch.adapter_slots.tolist() == [1, 1, -1, 0]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens is 3, less than max_running_requests 4"),
        ({"page_size": 0}, "page_size is 0; expected at least 1"),
        ({"num_pages": 1}, "num_pages is 1; expected at least 2"),
    ],
)
def test_limits_that_cannot_work_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(**changes)


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "changes", "message"),
    [
        (0, 1, {}, "the prompt is empty"),
        (
            64,
            1,
            {},
            "the prompt has 64 tokens, but max_model_len is 64 .* raise .*max_model_len if the model takes more",
        ),
        (30, 20, {"num_pages": 9}, "needs 13 KV pages of 4 tokens, but only 8 exist"),
        (50, None, {"num_pages": 9}, "needs 13 KV pages of 4 tokens, but only 8 exist"),
    ],
)
def test_a_request_that_could_never_fit_is_refused_on_arrival(
    prompt_len: int, max_tokens: int | None, changes: dict[str, int], message: str
) -> None:
    scheduler = Scheduler(make_config(**changes))
    with pytest.raises(RequestError, match=message):
        scheduler.add(make_request("a", prompt_of(prompt_len), max_tokens=max_tokens))
    assert not scheduler.has_work()


def test_a_request_that_just_fits_runs_in_all_pages_there_are() -> None:
    simulation = Simulation(make_config(num_pages=9))
    request = simulation.add(make_request("a", prompt_of(30), max_tokens=3, **FREE))
    simulation.run()
    assert len(request.output_token_ids) == 3  # 32 tokens written; the 33rd needs no page
    with pytest.raises(RequestError):
        simulation.add(make_request("b", prompt_of(30), max_tokens=4))


def test_requests_of_one_id_are_told_apart() -> None:
    scheduler = Scheduler(make_config())
    first, second = make_request("a", [2]), make_request("a", [2])
    scheduler.add(first)
    scheduler.add(second)
    assert scheduler.abort(second)
    assert [request.is_finished for request in (first, second)] == [False, True]
    assert scheduler.schedule().requests == [first]


@pytest.mark.parametrize(("max_tokens", "expected"), [(None, 54), (1000, 54), (5, 5)])
def test_the_output_is_clipped_to_max_model_len(max_tokens: int | None, expected: int) -> None:
    simulation = Simulation(make_config())
    request = simulation.add(make_request("a", prompt_of(10), max_tokens=max_tokens, **FREE))
    simulation.run()
    assert (len(request.output_token_ids), request.finish_reason) == (expected, "length")


# --- batches ----------------------------------------------------------------------------------------------------------


def test_a_prompt_is_cut_by_the_token_budget_and_sampled_at_its_end_alone() -> None:
    scheduler = Scheduler(make_config(max_num_batched_tokens=10))
    prompt = prompt_of(25)
    scheduler.add(make_request("a", prompt))
    batches = [scheduler.schedule() for _ in range(3)]
    assert [batch.num_tokens for batch in batches] == [10, 10, 5]
    assert [batch.prefix_lens.tolist() for batch in batches] == [[0], [10], [20]]
    assert [batch.sample_mask.tolist() for batch in batches] == [[False], [False], [True]]
    assert np.concatenate([batch.prefill_token_ids for batch in batches]).tolist() == prompt
    assert [batch.page_positions.tolist() for batch in batches] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [[request.request_id for request in batch.admitted] for batch in batches] == [["a"], [], []]


def test_decodes_come_first_and_prompts_share_what_they_leave_of_the_budget() -> None:
    simulation = Simulation(make_config(max_num_batched_tokens=10))
    simulation.add(make_request("a", prompt_of(3), **FREE))
    simulation.add(make_request("b", prompt_of(3), **FREE))
    assert simulation.step().num_decodes == 0
    simulation.add(make_request("c", prompt_of(12), **FREE))
    mixed = [simulation.step(), simulation.step()]
    assert [ids(batch) for batch in mixed] == [["a", "b", "c"], ["a", "b", "c"]]
    assert [batch.num_new.tolist() for batch in mixed] == [[1, 1, 8], [1, 1, 4]]
    assert [batch.num_decodes for batch in mixed] == [2, 2]
    assert [batch.sample_mask.tolist() for batch in mixed] == [[True, True, False], [True, True, True]]
    assert simulation.step().num_decodes == 3
    simulation.run()
    simulation.check_answers()


def test_decodes_and_prompts_share_steps() -> None:
    simulation = Simulation(make_config())
    simulation.add(make_request("a", prompt_of(3), **FREE))
    first, second = simulation.step(), simulation.step()
    simulation.add(make_request("b", prompt_of(3), **FREE))
    batches = (first, second, simulation.step())
    assert [(batch.num_decodes, batch.num_requests) for batch in batches] == [(0, 1), (1, 1), (1, 2)]


def test_a_steady_decode_shares_its_constant_arrays_from_step_to_step() -> None:
    simulation = Simulation(make_config(), steps_ahead=1)
    for name in "ab":
        simulation.add(make_request(name, prompt_of(3), max_tokens=20, **FREE))
    simulation.step()
    before, after = simulation.step(), simulation.step()
    assert after.requests is before.requests and after.rows is before.rows and after.num_new is before.num_new
    assert after.prefix_lens.tolist() == (before.prefix_lens + 1).tolist()
    with pytest.raises(ValueError, match="read-only"):
        after.rows[0] = 1


def test_nothing_to_do_is_no_batch() -> None:
    scheduler = Scheduler(make_config())
    assert scheduler.schedule() is None
    assert not scheduler.has_work()


def test_first_come_is_first_served_but_the_more_urgent_go_before() -> None:
    simulation = Simulation(make_config(max_running_requests=1))
    for name, priority in [("a", 0), ("b", 1), ("c", 0), ("d", -1)]:
        simulation.add(make_request(name, prompt_of(3), priority=priority, max_tokens=2))
    served: list[str] = []
    while simulation.scheduler.has_work():
        served += [request.request_id for request in simulation.step().admitted]
    assert served == ["d", "a", "c", "b"]


def test_a_large_request_at_the_head_is_not_overtaken_by_small_ones() -> None:
    simulation = Simulation(make_config(num_pages=13, max_num_batched_tokens=64))
    simulation.add(make_request("running", prompt_of(20), max_tokens=10, **FREE))
    simulation.step()
    simulation.add(make_request("large", prompt_of(40, first=5), max_tokens=2))
    simulation.add(make_request("small", prompt_of(2), max_tokens=2))
    assert ids(simulation.step()) == ["running"]
    simulation.run()
    simulation.check_answers()
    assert simulation.requests[1].scheduled_time < simulation.requests[2].scheduled_time


def test_updates_out_of_order_or_of_another_size_are_internal_errors() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(make_request("a", prompt_of(3), **FREE))
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(RuntimeError, match="step 1 was updated, but step 0 is the next one due"):
        scheduler.update(second, np.array([2]))
    with pytest.raises(RuntimeError, match="tokens of shape"):
        scheduler.update(first, np.array([2, 2]))


# --- how requests end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "stop_reason"),
    [
        ({}, [5, 6, EOS], "stop", None),
        ({"stop_token_ids": [STOP]}, [5, STOP], "stop", STOP),
        ({"ignore_eos": True, "max_tokens": 3}, [EOS, 5, EOS], "length", None),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, [5, EOS], "stop", EOS),
        ({"max_tokens": 2}, [5, EOS], "stop", None),
        ({"max_tokens": 1}, [5], "length", None),
        ({"min_tokens": 2}, [EOS, EOS], "stop", None),
    ],
)
def test_a_request_ends_at_its_stop_token_or_its_length(
    params: dict, tokens: list[int], reason: str, stop_reason: int | None
) -> None:
    scheduler = Scheduler(make_config())
    request = make_request("a", prompt_of(3), **params)
    scheduler.add(request)
    run_alone(scheduler, tokens)
    assert (request.output_token_ids, request.finish_reason, request.stop_reason) == (tokens, reason, stop_reason)
    assert not scheduler.has_work()
    assert scheduler.stats().pages_used == 0


def test_an_update_says_which_rows_got_a_token_and_which_requests_it_ended() -> None:
    scheduler = Scheduler(make_config(max_num_batched_tokens=8))
    a, b, c = (make_request(name, prompt_of(3), max_tokens=m) for name, m in [("a", 1), ("b", 9), ("c", 9)])
    for request in (a, b, c):
        scheduler.add(request)
    batch = scheduler.schedule()
    assert batch.num_new.tolist() == [3, 3, 2]
    scheduler.abort(b)
    result = scheduler.update(batch, np.array([7, 7, 7]))
    assert result.accepted == [0]
    assert result.finished == [a]
    assert [request.output_token_ids for request in (a, b, c)] == [[7], [], []]
    assert a.first_token_time == a.last_token_time is not None


@pytest.mark.parametrize("end", ["eos", "abort", "finish"])
def test_with_overlap_the_extra_token_of_an_ended_request_is_dropped_and_its_pages_wait_for_it(end: str) -> None:
    scheduler = Scheduler(make_config())
    request = make_request("a", prompt_of(3), max_tokens=9)
    scheduler.add(request)
    first, second = scheduler.schedule(), scheduler.schedule()
    finished = scheduler.update(first, np.array([EOS if end == "eos" else 7])).finished
    if end == "eos":
        assert finished == [request]
    else:
        assert scheduler.finish(request, "stop", "text") if end == "finish" else scheduler.abort(request)
    assert request.status is RequestStatus.FINISHED and request.row == 1
    assert scheduler.stats().pages_used == 1
    assert scheduler.has_work() and scheduler.schedule() is None
    assert scheduler.update(second, np.array([7])).accepted == []
    assert len(request.output_token_ids) == 1
    scheduler.finish_update()
    assert request.row == -1
    assert scheduler.stats().pages_used == 0 and not scheduler.has_work()


@pytest.mark.parametrize("by", ["finish_update", "schedule", "stats"])
def test_tokens_come_before_pages_are_shared_and_rows_given_back_which_whatever_needs_it_does(by: str) -> None:
    scheduler = Scheduler(make_config(max_num_batched_tokens=32))
    ends, goes_on = make_request("a", prompt_of(9), max_tokens=1), make_request("b", prompt_of(9), max_tokens=9)
    for request in (ends, goes_on):
        scheduler.add(request)
    batch = scheduler.schedule()
    assert scheduler.update(batch, np.array([7, 7])).finished == [ends]
    assert ends.output_token_ids == goes_on.output_token_ids == [7]
    assert ends.row > 0 and scheduler.pages.cache.num_pages == 0
    getattr(scheduler, by)()
    assert ends.row == -1 and scheduler.pages.cache.num_pages > 0


def test_with_overlap_no_step_is_planned_past_the_length_that_the_host_can_count() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(make_request("a", prompt_of(3), max_tokens=2))
    batches = [scheduler.schedule(), scheduler.schedule(), scheduler.schedule()]
    assert [batch is not None for batch in batches] == [True, True, False]


def test_ending_what_does_not_live_is_harmless_and_a_wrong_reason_is_not() -> None:
    scheduler = Scheduler(make_config())
    request = make_request("a", [2])
    assert not scheduler.abort(request)
    scheduler.add(request)
    with pytest.raises(ValueError, match="finish reason 'done'; expected one of stop, length, abort"):
        scheduler.finish(request, "done")
    assert scheduler.abort(request) and not scheduler.abort(request)


def test_a_failed_step_ends_its_requests_and_gives_everything_back() -> None:
    simulation = Simulation(make_config(max_running_requests=2), steps_ahead=1)
    for name in "abc":
        simulation.add(make_request(name, prompt_of(9), max_tokens=20, **FREE))
    simulation.step()
    simulation.plan()
    lost = [simulation.scheduler.fail(simulation.in_flight.popleft()[0]) for _ in range(2)]
    assert [[request.request_id for request in requests] for requests in lost] == [["a", "b"], []]
    simulation.run()
    assert simulation.requests[2].finish_reason == "length"
    simulation.check_answers()
    simulation.check_all_returned()


# --- prefix cache -----------------------------------------------------------------------------------------------------


def test_a_prefix_hit_gives_the_same_tokens_as_a_cold_prompt() -> None:
    simulation = Simulation(make_config())
    simulation.add(make_request("cold", prompt_of(18), max_tokens=5, **FREE))
    simulation.run()
    hit = simulation.add(make_request("hit", prompt_of(18), max_tokens=5, **FREE))
    batch = simulation.step()
    assert hit.num_cached_tokens == 16
    assert batch.prefix_lens.tolist() == [16] and batch.prefill_token_ids.tolist() == prompt_of(18)[16:]
    assert batch.page_positions.tolist() == [0, 1, 2, 3, 4], "the cached pages are written to the row's page table too"
    simulation.run()
    simulation.check_answers()
    stats = simulation.scheduler.stats()
    assert (stats.prefix_hit_tokens, stats.prefix_queried_tokens) == (16, 36)


def test_a_wholly_cached_prompt_still_computes_its_last_token() -> None:
    simulation = Simulation(make_config())
    for name in "ab":
        simulation.add(make_request(name, prompt_of(16), max_tokens=5, **FREE))
        simulation.run()
    assert simulation.requests[1].num_cached_tokens == 12
    simulation.check_answers()


def test_an_answer_is_cached_up_to_its_last_token_whose_kv_was_never_written() -> None:
    simulation = Simulation(make_config(page_size=1, num_pages=40))
    first = simulation.add(make_request("a", prompt_of(3), max_tokens=5, **FREE))
    simulation.run()
    assert simulation.scheduler.stats().pages_cached == 3 + 5 - 1
    second = simulation.add(make_request("b", [*first.all_token_ids.tolist(), 3], max_tokens=5, **FREE))
    simulation.run()
    assert second.num_cached_tokens == 7
    simulation.check_answers()


def test_a_chunk_is_shared_once_its_step_is_over_while_the_prompt_goes_on() -> None:
    simulation = Simulation(make_config(max_num_batched_tokens=12))
    simulation.add(make_request("a", prompt_of(40), max_tokens=2, **FREE))
    simulation.step()
    batch = simulation.scheduler.schedule()
    simulation.in_flight.append((batch, simulation.device.run(batch)))
    assert simulation.scheduler.stats().pages_cached == 3, "the second chunk is not written yet"
    simulation.collect()
    assert simulation.scheduler.stats().pages_cached == 6
    later = simulation.add(make_request("b", prompt_of(40), max_tokens=2, **FREE))
    simulation.run()
    assert later.num_cached_tokens >= 24
    simulation.check_answers()


def test_two_requests_that_compute_a_prefix_at_once_share_nothing_until_one_ends() -> None:
    simulation = Simulation(make_config(max_num_batched_tokens=64))
    for name in "ab":
        simulation.add(make_request(name, prompt_of(16), max_tokens=6, **FREE))
    assert simulation.step().num_tokens == 32
    stats = simulation.scheduler.stats()
    assert (stats.pages_cached, stats.pages_used) == (4, 8)
    simulation.run()
    simulation.check_answers()
    assert simulation.scheduler.stats().pages_cached == 5
    simulation.check_all_returned()


@pytest.mark.parametrize("difference", ["salt", "prompt_logprobs", "disabled", "flushed"])
def test_what_must_not_hit_does_not(difference: str) -> None:
    simulation = Simulation(make_config(enable_prefix_cache=difference != "disabled"))
    simulation.add(make_request("a", prompt_of(18), max_tokens=2))
    simulation.run()
    if difference == "flushed":
        simulation.scheduler.flush_prefix_cache()
    salt = ("image",) if difference == "salt" else ()
    prompt_logprobs = 1 if difference == "prompt_logprobs" else None
    simulation.add(make_request("b", prompt_of(18), salt=salt, prompt_logprobs=prompt_logprobs, max_tokens=2))
    simulation.run()
    assert simulation.requests[1].num_cached_tokens == 0
    simulation.check_answers()


def test_prompt_logprobs_ask_for_the_rows_of_the_prompt_and_of_no_decode() -> None:
    simulation = Simulation(make_config(max_num_batched_tokens=8))
    simulation.add(make_request("a", prompt_of(12), prompt_logprobs=0, max_tokens=3, **FREE))
    flags = [simulation.step().prompt_logprob_rows.tolist() for _ in range(3)]
    assert flags == [[True], [True], [False]]


def test_old_prefixes_make_room_for_new_requests() -> None:
    simulation = Simulation(make_config(num_pages=9))
    for i in range(6):
        simulation.add(make_request(str(i), prompt_of(20, first=i), max_tokens=4, **FREE))
        simulation.run()
    simulation.check_answers()
    assert simulation.scheduler.stats().preemptions == 0
    simulation.check_all_returned()


def test_a_config_is_frozen_and_can_be_varied() -> None:
    config = make_config()
    assert replace(config, num_pages=3).max_tokens_per_request == 2 * config.page_size + 1
    assert config.max_tokens_per_request == config.max_model_len


# --- pages in a row ---------------------------------------------------------------------------------------------------


def test_the_pages_of_long_prompts_follow_each_other_beside_answers_that_grow() -> None:
    scheduler = Scheduler(
        make_config(num_pages=1200, max_num_batched_tokens=300, max_model_len=4096, max_running_requests=6)
    )
    for index in range(4):
        scheduler.add(make_request(f"grows {index}", prompt_of(7), max_tokens=60, **FREE))
    run_alone(scheduler, [5])
    long = [
        make_request(f"long {length}", prompt_of(length, first), max_tokens=3, **FREE)
        for length, first in ((2100, 3), (2070, 4))
    ]
    for request in long:
        scheduler.add(request)
    seen = 0
    while not all(request.is_finished for request in long):
        run_alone(scheduler, [5])
        for request in (one for one in long if one.row >= 0):
            pages = scheduler.pages.table[request.row, : scheduler.pages.num_pages[request.row]]
            assert (np.diff(pages[: 2070 // 4]) == 1).all()
            seen = max(seen, pages.size)
    assert seen >= 2100 // 4
    while scheduler.has_work():
        run_alone(scheduler, [5])
    assert not scheduler.pages.allocator._is_set_aside.any()
