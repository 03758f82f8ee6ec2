"""Estimates match the time of steps, even if a few were delayed."""

from __future__ import annotations

from random import Random

import pytest

from mllm_compile.runtime.schedule.step_cost import StepCost, StepLoad, pairs_of


def true_ms(load: StepLoad) -> float:
    """About an 8B model on an H200."""
    keys = 2e-5 * load.decode_keys
    if not load.prompt_tokens:
        return 3.5 + 0.004 * load.num_decodes + keys
    return 1.5 + 0.02 * (load.num_decodes + load.prompt_tokens) + 8e-7 * load.prompt_pairs + keys


def step_ms(cost: StepCost, load: StepLoad) -> float:
    """The estimate for a step; never less than for its decodes alone."""
    decodes = cost.decodes_ms(load.num_decodes, load.decode_keys)
    if not load.prompt_tokens:
        return decodes
    prompts = cost.token_ms * load.prompt_tokens + cost.pair_ms * load.prompt_pairs
    return max(decodes, cost.beside_ms(load.num_decodes, load.decode_keys) + prompts)


def random_load(draw: Random) -> StepLoad:
    num_decodes = draw.randint(0, 64)
    keys = num_decodes * draw.randint(100, 8000)
    tokens = draw.choice([0, draw.randint(64, 4000)]) if num_decodes else draw.randint(64, 4000)
    return StepLoad(num_decodes, keys, tokens, pairs_of(tokens, draw.randint(0, 30_000)))


def learnt(num_steps: int, noise: float = 0.0, held_up: float = 0.0) -> StepCost:
    """An estimate after random steps; a share `held_up` of them took five times as long."""
    draw, cost = Random(0), StepCost()
    for _ in range(num_steps):
        load = random_load(draw)
        factor = 5.0 if draw.random() < held_up else 1 + noise * draw.uniform(-1, 1)
        cost.learn(load, true_ms(load) * factor)
    return cost


def errors(cost: StepCost) -> list[float]:
    """The relative errors of steps with prompts, ascending."""
    draw = Random(1)
    loads = [load for load in (random_load(draw) for _ in range(200)) if load.prompt_tokens]
    return sorted(abs(step_ms(cost, load) / true_ms(load) - 1) for load in loads)


def test_linear_times_are_found_exactly() -> None:
    cost = learnt(200)
    assert max(errors(cost)) < 0.02
    assert cost.decodes_ms(32, 32 * 2000) == pytest.approx(3.5 + 0.128 + 1.28, rel=0.02)
    assert (cost.token_ms, cost.pair_ms) == (pytest.approx(0.02, rel=0.02), pytest.approx(8e-7, rel=0.05))


def test_noise_and_steps_that_were_held_up_hardly_move_it() -> None:
    assert max(errors(learnt(200, noise=0.1))[:-5]) < 0.1
    assert max(errors(learnt(200, noise=0.05, held_up=0.05))[:-5]) < 0.25


def test_ends_that_are_seen_late_hardly_move_it() -> None:
    """If one step seems longer, the next one seems shorter."""
    draw, cost, late = Random(4), StepCost(), 0.0
    for _ in range(300):
        load = random_load(draw)
        before, late = late, draw.uniform(0, 4.0)
        cost.learn(load, max(0.05, true_ms(load) + late - before))
    assert max(errors(cost)[:-5]) < 0.15
    assert cost.decodes_ms(32, 64_000) == pytest.approx(true_ms(StepLoad(32, 64_000)), rel=0.2)


def test_it_follows_a_device_that_has_become_slower() -> None:
    draw, cost = Random(2), learnt(300)
    for _ in range(150):
        load = random_load(draw)
        cost.learn(load, 1.4 * true_ms(load))
    load = StepLoad(32, 64_000, 900, pairs_of(900, 10_000))
    assert step_ms(cost, load) == pytest.approx(1.4 * true_ms(load), rel=0.05)


def test_one_step_is_put_down_to_its_tokens() -> None:
    cost = StepCost()
    assert not cost.knows_prompts and step_ms(cost, StepLoad(0, 0, 100, 5000.0)) == 0
    cost.learn(StepLoad(0, 0, 512, pairs_of(512, 0)), 12.0)
    assert cost.knows_prompts and not cost.knows_decodes
    assert cost.token_ms * 512 == pytest.approx(12.0, rel=0.02)


def test_no_estimate_is_negative_whatever_was_seen() -> None:
    draw, cost = Random(3), StepCost()
    for _ in range(300):
        cost.learn(random_load(draw), draw.choice([0.0, 1e-9, 0.1, 5.0, 1e6]))
        load = random_load(draw)
        assert step_ms(cost, load) >= 0 and cost.token_ms >= 0 and cost.pair_ms >= 0
        assert cost.decodes_ms(load.num_decodes, load.decode_keys) >= 0
