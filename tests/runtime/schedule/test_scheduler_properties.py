"""Random histories of adding, aborting, finishing, preempting and evicting, against the model run alone.

`make test-all` runs 10,000 of them, `make test` a sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.media.grids import GridTower
from mllm_compile.runtime.speculation.drafter import Speculation
from mllm_compile.runtime.speculation.texts import TextDrafter
from tests.runtime.schedule.image_cases import AHEAD, TOWER, Part, request_of
from tests.runtime.schedule.scheduler_simulation import (
    STOP,
    VOCAB,
    GuessingDrafter,
    Simulation,
    check_pages,
    linear_ms,
    make_config,
    make_request,
)

SAMPLE = settings(max_examples=150, suppress_health_check=list(HealthCheck))
FULL = settings(SAMPLE, max_examples=10_000)


@dataclass(frozen=True)
class History:
    """A scheduler's limits, how far it runs ahead, what happens to it, the seed of all choices in that, and the tower
    of half of the prompts."""

    limits: dict[str, Any]
    steps_ahead: int
    events: list[str]
    seed: int
    tower: GridTower | None = None
    # Most tokens, GuessingDrafter's kinds, and whether the length is chosen by cost.
    drafts: tuple[int, list[str], bool] | None = None


# `plan` and `collect` alone vary how far the host runs ahead.
_EVENT = st.sampled_from(
    ["add"] * 10 + ["step"] * 12 + ["plan", "collect", "collect", "abort", "finish", "finish", "fail", "lose", "flush"]
)


@st.composite
def histories(draw: st.DrawFn) -> History:
    max_running = draw(st.integers(1, 6))
    page_size = draw(st.sampled_from([1, 2, 4]))
    max_model_len = draw(st.integers(8, 64))
    limits = {
        "max_running_requests": max_running,
        "max_num_batched_tokens": max_running + draw(st.integers(0, 24)),
        "max_model_len": max_model_len,
        "page_size": page_size,
        # From less than one longest request to about two of them.
        "num_pages": 2 + max_model_len * draw(st.integers(2, 8)) // (4 * page_size),
        "enable_prefix_cache": draw(st.sampled_from([True, True, True, False])),
        "max_step_ms": draw(st.sampled_from(["none", "tenfold", 0.01, 3.5, 4.0])),
        "step_sizes": draw(st.sampled_from([(), (2, 4, 8, 16)])),
    }
    tower = draw(st.sampled_from([None, None, TOWER, AHEAD]))
    if limits["enable_prefix_cache"] and tower is not AHEAD:  # which no model with states has
        limits["num_snapshots"] = draw(st.sampled_from([0, 0, 1, 2, 5, 20]))
    kinds = st.lists(st.sampled_from(["right", "wrong", "any", "none"]), min_size=1, max_size=4)
    drafts = draw(st.one_of(st.none(), st.tuples(st.sampled_from([1, 2, 5, 9]), kinds, st.booleans())))
    events = draw(st.lists(_EVENT, min_size=20, max_size=80))
    return History(limits, draw(st.integers(0, 2)), events, draw(st.integers(0, 2**32 - 1)), tower, drafts)


def _parts(choose: Random, length: int) -> list[Part]:
    """A prompt of texts and of two images again and again."""
    parts: list[Part] = []
    while length > 0:
        text = min(length, choose.randint(1, 6))
        features = min(length - text, choose.choice([0, 3, 9, 14]))
        parts += [text, (features, choose.choice([b"a", b"b"]))] if features else [text]
        length -= text + features
    return parts


def _add(simulation: Simulation, choose: Random, tower: GridTower | None) -> None:
    """A prompt from a family of few, so that prefixes are shared; every kind of ending."""
    config = simulation.config
    family, length = choose.randrange(3), choose.randint(1, config.max_model_len * 2 // 3)
    prompt = [(family * 5 + i * i) % VOCAB for i in range(length)]
    if choose.random() < 0.3:
        prompt[choose.randrange(length)] = choose.randrange(VOCAB)
    name = f"r{len(simulation.requests)}"
    params = {
        "priority": choose.choice([0, 0, 0, 1]),
        "salt": choose.choice([(), (), (), ("other",)]),
        "max_tokens": choose.choice([None, choose.randint(1, 5), choose.randint(5, 40)]),
        "ignore_eos": choose.random() < 0.5,
        "stop_token_ids": [STOP] if choose.random() < 0.3 else None,
        "prompt_logprobs": 0 if choose.random() < 0.1 else None,
    }
    if tower is not None and choose.random() < 0.5:
        request = request_of(name, *_parts(choose, length), tower=tower, **params)
    else:
        request = make_request(name, prompt, **params)
    try:
        simulation.add(request)
    except RequestError as error:
        if request.media is not None and "an image has" in str(error):
            return
        longest = min(length + (request.params.max_tokens or 1), config.max_model_len)
        assert length >= config.max_model_len or longest > config.max_tokens_per_request


def _happen(simulation: Simulation, event: str, choose: Random, tower: GridTower | None) -> None:
    live = [request for request in simulation.requests if not request.is_finished]
    if event == "add":
        _add(simulation, choose, tower)
    elif event == "step":
        simulation.step()
    elif event == "plan" and len(simulation.in_flight) < 3:
        simulation.plan()
    elif event == "collect" and simulation.in_flight:
        simulation.collect()
    elif event == "abort" and live:
        assert simulation.scheduler.abort(choose.choice(live))
    elif event == "finish" and live:
        assert simulation.scheduler.finish(choose.choice(live), "stop", "outside")
    elif event == "fail" and simulation.in_flight and choose.random() < 0.2:
        simulation.scheduler.fail(simulation.in_flight.popleft()[0])
    elif event == "lose" and choose.random() < 0.3:
        simulation.lose()
    elif event == "flush":
        simulation.scheduler.flush_prefix_cache()


def _check(history: History) -> Simulation:
    choose = Random(history.seed)
    clock = Random(history.seed)  # steps of all lengths: what is learnt from them is often wrong
    speculation = drafter = None
    if history.drafts is not None:
        most, kinds, by_cost = history.drafts
        drafter = GuessingDrafter(Random(history.seed), kinds)
        speculation = Speculation(drafter=TextDrafter(drafter), num_tokens=most, vocab_size=VOCAB, by_cost=by_cost)
    simulation = Simulation(
        make_config(**history.limits),
        history.steps_ahead,
        lambda batch: linear_ms(batch, token=0.2) * clock.choice([0.0, 1.0, 1.0, 20.0]),
        speculation,
    )
    simulation.scheduler.pages._long = clock.choice([1, 3, 512])  # from so many pages on they follow each other
    for event in history.events:
        _happen(simulation, event, choose, history.tower)
        check_pages(simulation.scheduler.pages)
    # Generous, but finite: one token of one request a step, all of it recomputed at every step of every other request.
    simulation.run(max_steps=200 * (1 + len(simulation.requests)))
    simulation.check_answers()
    simulation.check_all_returned()
    assert drafter is None or not drafter.live, "drafters of requests that are over are told"
    return simulation


# Two steps of one request are in flight when it is preempted, and the first of them is lost.
_LOST_BEFORE_A_PREEMPTION = History(
    limits={
        "max_running_requests": 2,
        "max_num_batched_tokens": 2,
        "max_model_len": 16,
        "page_size": 1,
        "num_pages": 10,
        "enable_prefix_cache": True,
    },
    steps_ahead=2,
    events=["add", "abort", "add", "step", *["add"] * 10, *["step"] * 4, "plan", "fail"],
    seed=47,
)


# A prompt is cut, a shorter one has a chunk beside it, and rounding to a captured size makes the first one whole.
_CUT_AND_WHOLE_AFTER_ALL = History(
    limits={
        "max_running_requests": 3,
        "max_num_batched_tokens": 9,
        "max_model_len": 48,
        "page_size": 2,
        "num_pages": 26,
        "enable_prefix_cache": False,
        "max_step_ms": "tenfold",
        "step_sizes": (2, 4, 8, 16),
    },
    steps_ahead=1,
    events=[
        *("add", "add", "step", "step", "collect", "collect", "step", "fail", "add", "step", "abort", "add"),
        *("step", "step", "step", "step", "add", "step", "add", "add"),
    ],
    seed=3688077,
)


# A prompt is admitted before one that is less urgent, whose images have taken the step's features already.
_URGENT_BEHIND_IMAGES = History(
    limits={
        "max_running_requests": 3,
        "max_num_batched_tokens": 8,
        "max_model_len": 48,
        "page_size": 1,
        "num_pages": 50,
        "enable_prefix_cache": True,
    },
    steps_ahead=0,
    events=["add", "add", "abort", "add", "add", "step", *["add"] * 14],
    seed=1,
    tower=TOWER,
)


@SAMPLE
@example(_LOST_BEFORE_A_PREEMPTION)
@example(_CUT_AND_WHOLE_AFTER_ALL)
@example(_URGENT_BEHIND_IMAGES)
@given(histories())
def test_any_history_gives_every_request_its_own_answer_and_every_page_back(history: History) -> None:
    _check(history)


@pytest.mark.slow
@FULL
@given(histories())
def test_ten_thousand_histories_give_every_request_its_own_answer_and_every_page_back(history: History) -> None:
    _check(history)
