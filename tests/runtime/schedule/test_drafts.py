"""Drafts in a whole scheduler: none is stale, and by cost they are made where they pay."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from mllm_compile.runtime.schedule.rope_lengths import RopeLengths
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.speculation.drafter import Speculation
from mllm_compile.runtime.speculation.texts import TextDrafter
from tests.runtime.schedule.scheduler_simulation import (
    FREE,
    VOCAB,
    GuessingDrafter,
    Simulation,
    make_config,
    make_request,
    prompt_of,
)


def simulated(
    kind: str, ms_of: Callable[[ScheduledBatch], float] | None, by_cost: bool, max_tokens: int, **limits: object
) -> tuple[Simulation, list[ScheduledBatch]]:
    """Four requests to their end, and their steps."""
    speculation = Speculation(
        drafter=TextDrafter(GuessingDrafter(Random(0), [kind])), num_tokens=5, vocab_size=VOCAB, by_cost=by_cost
    )
    simulation = Simulation(make_config(**limits), 1, ms_of, speculation)
    for index in range(4):
        simulation.add(make_request(f"r{index}", prompt_of(5 + index), max_tokens=max_tokens, **FREE))
    batches = []
    while simulation.scheduler.has_work():
        batch = simulation.step()
        if batch is not None:
            batches.append(batch)
    simulation.check_answers()
    return simulation, batches


@pytest.mark.parametrize("num_pages", [99, 30, 20])
def test_right_drafts_are_accepted_whole_also_after_preemptions(num_pages):
    """So none was made before a preemption, or of tokens that the request does not have."""
    simulation, batches = simulated("right", None, False, 50, num_pages=num_pages)
    assert (simulation.scheduler.stats().preemptions > 0) is (num_pages < 99)
    assert any(batch.has_drafts for batch in batches)
    for request in simulation.requests:
        assert request.num_accepted_tokens == request.num_drafted_tokens > 0


def test_a_draft_ends_ahead_of_what_is_no_token():
    """The simulation looks at each token of a step; some guesses are -1, some one beyond the vocabulary."""
    simulation, batches = simulated("any", None, False, 50)
    assert any(batch.has_drafts for batch in batches)
    assert all(0 < request.num_accepted_tokens < request.num_drafted_tokens for request in simulation.requests)


def test_no_draft_crosses_the_length_at_which_a_request_is_computed_anew():
    rope = RopeLengths(boundary=21, of_each_length=False, recomputes=True)
    simulation, batches = simulated("right", None, False, 50, rope=rope, num_pages=99)
    assert simulation.scheduler.stats().preemptions == len(simulation.requests)
    ends = set()
    for batch in batches:
        of_decodes = zip(batch.prefix_lens[: batch.num_decodes].tolist(), batch.num_new.tolist(), strict=False)
        for start, count in of_decodes:
            assert not start < rope.boundary < start + count
            ends.add(start + count)
    assert rope.boundary in ends and max(ends) > rope.boundary + 1


def test_right_drafts_by_cost_save_steps_where_a_step_takes_always_as_long():
    _, batches = simulated("right", lambda batch: 3.0, True, 200, max_model_len=256, num_pages=300)
    assert sum(batch.has_drafts for batch in batches) > 10
    assert len(batches) < 120, "of 200 without drafts"


def test_by_cost_hardly_a_token_is_drafted_where_each_takes_as_long_as_a_step_of_one():
    _, batches = simulated("right", lambda batch: 3.0 * batch.num_tokens, True, 200, max_model_len=256, num_pages=300)
    assert sum(batch.num_decode_tokens - batch.num_decodes for batch in batches) <= 48, "tries; 179 without a choice"
    assert not any(batch.has_drafts for batch in batches[50:])


def test_wrong_drafts_by_cost_become_rare():
    _, batches = simulated(
        "wrong", lambda batch: 3.0 + 0.3 * batch.num_tokens, True, 200, max_model_len=256, num_pages=300
    )
    assert sum(batch.has_drafts for batch in batches[100:]) < 20


def test_what_fills_a_draft_is_of_the_vocabulary():
    """A prompt's ids need not be, where images are."""
    drafter = TextDrafter(GuessingDrafter(Random(0), ["none"]))
    simulation = Simulation(
        make_config(), 1, speculation=Speculation(drafter=drafter, num_tokens=3, vocab_size=VOCAB, fills=True)
    )
    simulation.add(make_request("r", [VOCAB, 3, -1, 4], max_tokens=5, **FREE))
    drafts = []
    while simulation.scheduler.has_work():
        batch = simulation.step()
        if batch is not None and batch.has_drafts:
            drafts.append(batch.verify_token_ids.tolist())
    assert drafts and drafts[0][1:] == [3, drafts[0][0], drafts[0][0]]
