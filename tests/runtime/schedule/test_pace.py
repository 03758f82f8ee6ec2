"""Steps with prompts keep to their bound, and no prompt waits for it for ever; by a clock that the tests turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from random import Random

import pytest

from mllm_compile.runtime.schedule.pace import TENFOLD, Pace, PromptBudget
from mllm_compile.runtime.schedule.prompts import Prompts
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.schedule.step_cost import StepLoad, pairs_of
from mllm_compile.runtime.speculation.drafter import Speculation
from mllm_compile.runtime.speculation.texts import TextDrafter
from tests.runtime.schedule.scheduler_simulation import (
    FREE,
    VOCAB,
    GuessingDrafter,
    Simulation,
    linear_ms,
    make_config,
    make_request,
    prompt_of,
)

BIG = {"max_running_requests": 64, "max_num_batched_tokens": 2048, "max_model_len": 20_000, "page_size": 16}
BIG |= {"num_pages": 6000, "enable_prefix_cache": False}


def big(**changes: object) -> Simulation:
    """About an 8B model on an H200, one step ahead."""
    return Simulation(make_config(**(BIG | changes)), 1, linear_ms)


def decoding(simulation: Simulation, count: int, max_tokens: int = 400) -> list[Request]:
    """Requests of 64 tokens that have begun to decode, and have done so for twenty steps."""
    requests = [
        simulation.add(make_request(f"d{i}", prompt_of(64, i), max_tokens=max_tokens, **FREE)) for i in range(count)
    ]
    while min(len(request.output_token_ids) for request in requests) < 20:
        simulation.step()
    return requests


def until_first_token(simulation: Simulation, request: Request) -> list[ScheduledBatch]:
    batches = []
    while not request.output_token_ids:
        batch = simulation.step()
        if batch is not None:
            batches.append(batch)
    return batches


def beside(batches: list[ScheduledBatch]) -> list[float]:
    """ms of the steps that have both kinds."""
    return [linear_ms(batch) for batch in batches if 0 < batch.num_decodes < batch.num_requests]


# --- the bound --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [8.0, 15.0, 25.0])
def test_steps_beside_decodes_keep_to_the_bound(bound: float) -> None:
    simulation = big(max_step_ms=bound)
    decoding(simulation, 32)
    prompt = simulation.add(make_request("long", prompt_of(16_000), max_tokens=4, **FREE))
    times = beside(until_first_token(simulation, prompt))
    assert max(times) <= bound * 1.1
    assert statistics.median(times) >= bound * 0.85, "and use it"
    simulation.run()
    simulation.check_answers()


def test_tenfold_costs_a_prompt_a_tenth_of_its_throughput_at_most() -> None:
    def seconds(max_step_ms: object) -> tuple[float, float]:
        simulation = big(max_step_ms=max_step_ms)
        decoding(simulation, 32)
        prompt = simulation.add(make_request("long", prompt_of(16_000), max_tokens=4, **FREE))
        batches = until_first_token(simulation, prompt)
        return sum(map(linear_ms, batches)), max(map(linear_ms, batches))

    unbound, longest = seconds("none")
    bound, longest_bound = seconds("tenfold")
    assert bound <= unbound / 0.9
    assert longest_bound <= 1.2 * TENFOLD * 3.1 < 0.8 * longest


def test_alone_a_prompt_gets_all_tokens_of_a_step() -> None:
    simulation = big(max_step_ms=5.0)
    prompt = simulation.add(make_request("long", prompt_of(6000), max_tokens=4, **FREE))
    assert [batch.num_tokens for batch in until_first_token(simulation, prompt)[:3]] == [2048, 2048, 1904]


def test_none_cuts_by_tokens_alone() -> None:
    simulation = big(max_step_ms="none")
    decoding(simulation, 8)
    prompt = simulation.add(make_request("long", prompt_of(6000), max_tokens=4, **FREE))
    assert [batch.num_tokens for batch in until_first_token(simulation, prompt)[:3]] == [2048, 2048, 6000 - 4080 + 8]


def test_a_bound_that_decodes_alone_exceed_leaves_prompts_a_page_a_step() -> None:
    simulation = big(max_step_ms=0.5)
    decoding(simulation, 8)
    prompt = simulation.add(make_request("long", prompt_of(640), max_tokens=4, **FREE))
    batches = until_first_token(simulation, prompt)
    assert [batch.num_tokens - batch.num_decodes for batch in batches[1:39]] == [16] * 38
    simulation.run()
    simulation.check_answers()


def test_the_first_chunk_is_small_while_nothing_is_known() -> None:
    pace = Pace(25.0)
    assert pace.budget(4, 400, 8000).longest(0) == 512
    assert pace.budget(0, 0, 8000).longest(0) == 8000


def test_a_prompt_is_cut_to_fill_captured_graphs_or_blocks_of_attention() -> None:
    sizes = tuple(range(64, 1025, 64))
    simulation = big(max_step_ms=12.0, step_sizes=sizes)
    decoding(simulation, 20)
    prompt = simulation.add(make_request("long", prompt_of(8000), max_tokens=4, **FREE))
    cut = [batch for batch in until_first_token(simulation, prompt) if 0 < batch.num_decodes < batch.num_requests]
    inner = cut[1:-1]  # the first one knows little, the last is the rest
    fills = [batch.num_tokens in sizes or (batch.num_tokens - batch.num_decodes) % 128 == 0 for batch in inner]
    assert sum(fills) >= 0.8 * len(inner) > 5
    simulation.run()
    simulation.check_answers()


def test_tenfold_fills_the_next_larger_graph_and_none_beyond_the_largest() -> None:
    tenfold, budget = Pace("tenfold", (64, 128, 256)), PromptBudget(1000, 9.0)

    def total(num_tokens: int, most: int = 1000) -> int:
        return 8 + tenfold.cut(num_tokens - 8, 8, 0, (1, most - 8), budget)

    assert [total(n) for n in (63, 64, 100, 256, 300)] == [64, 64, 128, 256, 300]
    assert total(100, most=110) == 100, "there are no more tokens"


def test_beyond_captured_graphs_a_prompt_is_cut_to_whole_waves_of_attention() -> None:
    tenfold, budget = Pace("tenfold", (64, 128, 256), 132 / 32), PromptBudget(4000, 60.0, 0.02, 1e-6, fixed_ms=3.0)
    cut = [tenfold.cut(chunk, 32, 25_000, (64, 4000), budget) for chunk in (1100, 1248, 1400, 1540)]
    assert cut == [1024, 1024, 1400, 1536], "of four blocks each; three quarters of a chunk are left of it"
    number = Pace(25.0, (), 132 / 32, divide_prefix=True)
    assert [number._attended(n) for n in (100, 256, 384, 512, 1024)] == [132, 264, 396, 528, 1056]
    assert Pace(25.0, (), 132 / 32)._attended(256) == Pace(25.0, (), 132 / 32)._attended(512) == 528


def test_a_number_cuts_to_what_gets_a_prompt_on_fastest() -> None:
    number = Pace(25.0, (64, 128, 256, 320, 384, 512))
    tokens_alone, attention = PromptBudget(1000, 9.0, 0.02, 0.0), PromptBudget(1000, 9.0, 0.001, 1e-6)

    def cut(chunk: int, budget: PromptBudget, context: int = 30_000, least: int = 1) -> int:
        return number.cut(chunk, 20, context, (least, 1000), budget)

    assert cut(380, tokens_alone) == 364, "384 tokens are captured, and 400 padded to 512"
    assert cut(350, tokens_alone) == 350, "370 tokens take as long as 384, and so do 320"
    assert cut(300, attention) == 256, "two blocks of attention; 300 take as long as 384"
    assert cut(380, attention) == 380, "nearly three of them"
    assert cut(300, attention, least=290) == 300, "the chunk would be too short"
    assert cut(150, attention) == 128
    assert cut(180, attention) == 180, "a quarter less is too little"


@pytest.mark.parametrize(("token", "pair"), [(0.02, 1e-6), (0.02, 0.0), (0.0, 1e-6)])
def test_the_longest_chunk_of_a_budget_takes_its_time(token: float, pair: float) -> None:
    for context in (0, 5000):
        budget = PromptBudget(100_000, 20.0, token, pair)
        length = budget.longest(context)
        assert token * length + pair * pairs_of(length, context) <= 20.0
        assert token * (length + 1) + pair * pairs_of(length + 1, context) > 20.0
    assert PromptBudget(100, 20.0).longest(0) == 100
    assert PromptBudget(100, -1.0, token, pair).longest(0) == 0


# --- fairness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", ["none", 25.0])
@pytest.mark.parametrize("num_decodes", [0, 16])
def test_a_short_prompt_does_not_wait_for_a_long_one(bound: object, num_decodes: int) -> None:
    simulation = big(max_step_ms=bound)
    if num_decodes:
        decoding(simulation, num_decodes)
    long = simulation.add(make_request("long", prompt_of(16_000), max_tokens=4, **FREE))
    for _ in range(3):
        simulation.step()
    short = simulation.add(make_request("short", prompt_of(200, 5), max_tokens=4, **FREE))
    assert len(until_first_token(simulation, short)) <= 3
    assert not long.output_token_ids
    simulation.run()
    simulation.check_answers()


def test_a_short_prompt_gets_on_also_where_decodes_take_all_time() -> None:
    simulation = big(max_step_ms=0.5)
    decoding(simulation, 8)
    long = simulation.add(make_request("long", prompt_of(4000), max_tokens=4, **FREE))
    simulation.step()
    short = simulation.add(make_request("short", prompt_of(60, 5), max_tokens=4, **FREE))
    batches = until_first_token(simulation, short)
    assert len(batches) <= 6 and all(long in batch.requests for batch in batches)


def test_prompts_of_one_length_are_served_one_after_another() -> None:
    simulation = big(max_step_ms="none")
    requests = [simulation.add(make_request(f"p{i}", prompt_of(6000, i), max_tokens=1, **FREE)) for i in range(4)]
    ends = {}
    for step in range(40):
        simulation.step()
        for request in requests:
            if request.is_finished:
                ends.setdefault(request.request_id, step)
    assert list(ends) == ["p0", "p1", "p2", "p3"]
    assert ends["p0"] <= ends["p3"] / 3, "not all at the end"


def test_a_long_prompt_gets_half_of_every_step_however_many_short_ones_come() -> None:
    simulation = big(max_step_ms="none", max_num_batched_tokens=512)
    long = simulation.add(make_request("long", prompt_of(8000), max_tokens=1, **FREE))
    for step in range(200):
        for i in range(4):
            simulation.add(make_request(f"s{step}-{i}", prompt_of(100, i), max_tokens=1, **FREE))
        simulation.step()
        if long.is_finished:
            break
    assert step <= 8000 / 256 + 3
    simulation.run()
    simulation.check_answers()


@pytest.mark.parametrize("bound", ["none", "tenfold", 6.0])
def test_of_many_long_prompts_none_waits_for_more_than_twice_the_work_ahead_of_it(bound: object) -> None:
    """Prompts of 200 to 6000 tokens that come at random beside answers; every step computes a token of each answer."""
    simulation, draw = big(max_step_ms=bound, max_num_batched_tokens=1024), Random(1)
    answers = decoding(simulation, 8, max_tokens=2000)
    computed = sent = 0  # tokens of prompts
    waiting: dict[Request, tuple[int, int]] = {}  # tokens computed when it came, and most until its end
    while sent < 24 or waiting:
        if sent < 24 and len(waiting) < 5 and draw.random() < 0.4:
            request = make_request(f"p{sent}", prompt_of(draw.randrange(200, 6000), sent), max_tokens=1, **FREE)
            ahead = sum(len(one.prompt_token_ids) - one.num_computed_tokens for one in waiting)
            waiting[simulation.add(request)] = computed, 2 * (ahead + len(request.prompt_token_ids))
            sent += 1
        batch = simulation.step()
        if batch is None:
            continue
        assert batch.num_decodes >= len(answers), "no answer sits out"
        computed += batch.num_tokens - batch.num_decodes
        for request in [one for one in waiting if one.output_token_ids]:
            begun, most = waiting.pop(request)
            assert computed - begun <= most + 2 * 1024, "its last step, and the one after, were planned by then"
    assert simulation.scheduler.stats().preemptions == 0


def test_a_shorter_prompt_of_lesser_priority_waits() -> None:
    simulation = big(max_step_ms="none", max_num_batched_tokens=512)
    long = simulation.add(make_request("long", prompt_of(4000), max_tokens=1, **FREE))
    later = simulation.add(make_request("later", prompt_of(50), priority=1, max_tokens=1, **FREE))
    batches = until_first_token(simulation, long)
    assert [batch.num_requests for batch in batches[:7]] == [1] * 7, "until it is the long one's last step"
    simulation.run()
    simulation.check_answers()
    assert later.output_token_ids


def test_a_shorter_prompt_leaves_pages_and_a_row_to_those_before_it() -> None:
    # 12 pages: the long one needs 8 in all, the next in line 5, so the short one gets none.
    simulation = big(max_step_ms="none", max_num_batched_tokens=64, max_running_requests=64, num_pages=13)
    simulation.add(make_request("long", prompt_of(128), max_tokens=1, **FREE))
    simulation.add(make_request("next", prompt_of(80), max_tokens=1, **FREE))
    simulation.add(make_request("short", prompt_of(10), max_tokens=1, **FREE))
    first = simulation.step()
    assert [request.request_id for request in first.requests] == ["long"]
    simulation.run()
    simulation.check_answers()


def test_without_tiers_nobody_counts_the_pages_of_begun_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(prompts: Prompts) -> int:
        raise AssertionError("of each request that waits, over all that have begun")

    monkeypatch.setattr(Prompts, "_pages_of_begun", property(counted))
    simulation = big(max_step_ms="none", max_num_batched_tokens=512)
    requests = [simulation.add(make_request(f"{i}", prompt_of(60), max_tokens=1, **FREE)) for i in range(20)]
    assert simulation.step().num_requests > 4
    simulation.run()
    assert all(request.output_token_ids for request in requests)


# --- what is learnt ---------------------------------------------------------------------------------------------------


def test_a_model_of_another_speed_is_found_within_a_few_steps() -> None:
    for factor in (0.1, 1.0, 10.0):
        ms_of: Callable[[ScheduledBatch], float] = partial(linear_ms, step=3 * factor, token=0.02 * factor)
        simulation = Simulation(make_config(**(BIG | {"max_step_ms": 10 * factor})), 1, ms_of)
        decoding(simulation, 16)
        prompt = simulation.add(make_request("long", prompt_of(16_000), max_tokens=4, **FREE))
        times = [ms_of(batch) for batch in until_first_token(simulation, prompt) if batch.num_requests > 16]
        assert max(times[4:]) <= 1.1 * 10 * factor


@pytest.mark.parametrize("max_step_ms", [20.0, "tenfold"])
def test_steps_whose_ends_are_seen_late_do_not_loosen_the_bound(max_step_ms: object) -> None:
    """The host is busy with the next step when one ends: by up to most of a decode step, now more, now less."""
    draw, late = Random(0), [0.0, 0.0]

    def seen_ms(batch: ScheduledBatch) -> float:
        late[:] = late[1], draw.choice([0.0, 0.5, 2.9])
        return max(0.05, linear_ms(batch) + late[1] - late[0])

    simulation = Simulation(
        make_config(**(BIG | {"max_step_ms": max_step_ms, "max_num_batched_tokens": 8192})), 1, seen_ms
    )
    decoding(simulation, 32, max_tokens=1000)
    for _ in range(2):
        prompt = simulation.add(make_request("long", prompt_of(16_000), max_tokens=4, **FREE))
        times = beside(until_first_token(simulation, prompt))
    assert max(times) <= 1.25 * (20.0 if max_step_ms == 20.0 else TENFOLD * 3.4)
    assert statistics.median(times) >= 0.7 * (20.0 if max_step_ms == 20.0 else TENFOLD * 3.1)


def test_only_some_of_a_steady_decodes_steps_are_taken_in() -> None:
    simulation = big(max_step_ms="tenfold")
    taken = []
    learn = simulation.scheduler.pace.cost.learn
    simulation.scheduler.pace.cost.learn = lambda load, ms: taken.append(load) or learn(load, ms)
    decoding(simulation, 4, max_tokens=180)
    simulation.run()
    assert 180 / 8 - 3 <= len([load for load in taken if not load.prompt_tokens]) <= 180 / 8 + 3
    assert isinstance(taken[0], StepLoad)


def test_steps_with_drafts_are_counted_by_their_tokens() -> None:
    drafter = TextDrafter(GuessingDrafter(Random(0), ("right", "none")))
    speculation = Speculation(drafter=drafter, num_tokens=3, vocab_size=VOCAB)
    limits = make_config(**(BIG | {"max_step_ms": "tenfold"}))
    simulation = Simulation(limits, 1, lambda batch: 2.0 + 0.1 * batch.num_tokens, speculation)
    decoding(simulation, 8, max_tokens=120)
    simulation.run()
    assert simulation.scheduler.pace.cost.decodes_ms(8, 800) == pytest.approx(2.8, rel=0.05)


def test_the_bound_is_among_the_figures() -> None:
    simulation = big(max_step_ms="tenfold")
    assert simulation.scheduler.stats().step_bound_ms is None
    decoding(simulation, 16)
    prompt = simulation.add(make_request("long", prompt_of(4000), max_tokens=4, **FREE))
    until_first_token(simulation, prompt)
    assert simulation.scheduler.stats().step_bound_ms == pytest.approx(TENFOLD * 3.1, rel=0.1)
