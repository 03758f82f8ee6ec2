"""Prompts with images in the scheduler: where their chunks end, and which of them share pages."""

from __future__ import annotations

import numpy as np
import pytest

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduler import Scheduler
from tests.runtime.schedule.image_cases import AHEAD, request_of
from tests.runtime.schedule.scheduler_simulation import FREE, Simulation, linear_ms, make_config, make_request


def chunks(scheduler: Scheduler, *requests: Request) -> list[list[int]]:
    """Runs requests to their end; the tokens of prompts in each step."""
    for request in requests:
        scheduler.add(request)
    found = []
    while (batch := scheduler.schedule()) is not None:
        found.append(batch.num_new[batch.num_decodes :].tolist())
        scheduler.update(batch, np.full(batch.num_requests, 5, dtype=np.int64))
    return [step for step in found if step]


def test_a_chunk_ends_before_an_image_that_is_one_too_many_for_the_step() -> None:
    scheduler = Scheduler(make_config(max_num_batched_tokens=16, enable_prefix_cache=False))
    # 10 features, then 8: both begin within 16 tokens.
    assert chunks(scheduler, request_of("two", 2, (10, b"a"), 1, (8, b"b"), 2)) == [[13], [10]]


def test_an_image_larger_than_a_step_is_encoded_alone_and_its_tokens_follow() -> None:
    scheduler = Scheduler(make_config(max_num_batched_tokens=16, enable_prefix_cache=False))
    assert chunks(scheduler, request_of("large", 1, (40, b"a"), 1)) == [[16], [16], [10]]


def test_of_several_prompts_those_whose_images_are_too_many_wait_for_the_next_step() -> None:
    scheduler = Scheduler(make_config(max_num_batched_tokens=32, enable_prefix_cache=False))
    two = [request_of(name, 1, (14, name[:1].encode()), 1, (10, b"x"), 1) for name in ("a", "b")]
    # 24 features of the first; the second has 5 tokens of the budget left, one of them text.
    steps = chunks(scheduler, *two)
    assert steps[0] == [27, 1]
    assert sum(map(sum, steps)) == 54


def test_pages_are_shared_by_prompts_of_the_same_image_alone() -> None:
    scheduler = Scheduler(make_config(max_num_batched_tokens=32, page_size=4))
    chunks(scheduler, request_of("first", 2, (12, b"a"), 4))
    again, other = request_of("again", 2, (12, b"a"), 4), request_of("other", 2, (12, b"b"), 4)
    chunks(scheduler, again, other)
    assert again.num_cached_tokens == 16
    assert other.num_cached_tokens == 0
    assert (again.cache_keys[:2] == 3).all() and (again.cache_keys[2:14] < 0).all()


def test_a_shorter_prompt_with_images_does_not_take_features_from_a_longer_one() -> None:
    scheduler = Scheduler(make_config(max_num_batched_tokens=16, enable_prefix_cache=False))
    requests = [request_of("long", 20, (40, b"a"), 1), request_of("image", (4, b"b"), 1), request_of("text", 3)]
    requests[-1].media = None
    for request in requests:
        scheduler.add(request)
    over = []
    while (batch := scheduler.schedule()) is not None:
        places = range(batch.num_decodes, batch.num_requests)
        over += [batch.requests[place].request_id for place in places if batch.sample_mask[place]]
        scheduler.update(batch, np.full(batch.num_requests, 5, dtype=np.int64))
    assert over == ["text", "long", "image"]


def test_images_of_one_step_have_no_more_features_than_the_pool_holds() -> None:
    """An image that goes on from the step before counts too, whether the tower runs for it or not."""
    scheduler = Scheduler(make_config(max_num_batched_tokens=16, enable_prefix_cache=False))
    for name in "abcdef":
        scheduler.add(request_of(name, 3, (9, name.encode()), 1, (5, name.upper().encode()), 2))
    most = 0
    while (batch := scheduler.schedule()) is not None:
        features = 0
        for place in range(batch.num_decodes, batch.num_requests):
            media, start = batch.requests[place].media, int(batch.prefix_lens[place])
            assert media is not None
            own = media.images_within(start, start + int(batch.num_new[place]))
            features += sum(image.end - image.start for image in own)
        most = max(most, features)
        scheduler.update(batch, np.full(batch.num_requests, 5, dtype=np.int64))
    assert 9 < most <= 16


def test_no_chunk_cuts_an_image_that_sees_ahead() -> None:
    scheduler = Scheduler(make_config(max_num_batched_tokens=16, enable_prefix_cache=False))
    # 13 tokens fit beside three decodes: the chunk ends before the second image, and the next one is all of it.
    one = request_of("one", 2, (9, b"a"), 1, (13, b"b"), 3, tower=AHEAD)
    assert chunks(scheduler, one) == [[12], [16]]


def test_images_that_see_ahead_wait_for_room_beside_decodes() -> None:
    scheduler = Scheduler(make_config(max_num_batched_tokens=16, enable_prefix_cache=False))
    requests = [request_of(name, 1, (13, name[:1].encode()), 1, tower=AHEAD) for name in ("a", "b", "c", "d")]
    steps = chunks(scheduler, *requests)
    assert sum(map(sum, steps)) == 60
    # Each chunk begins or ends with the image, or is without it.
    assert all(length in (1, 2, 13, 14, 15) for step in steps for length in step)


def test_an_image_that_takes_most_of_a_step_is_not_put_off_for_shorter_prompts() -> None:
    """Half of a step is for those, and they may come for ever."""
    scheduler = Scheduler(make_config(max_num_batched_tokens=16, enable_prefix_cache=False))
    first = request_of("first", (12, b"a"), 9, tower=AHEAD)
    scheduler.add(first)
    for number in range(4):
        scheduler.add(make_request(f"shorter {number}", [3] * 6, max_tokens=1))
    batch = scheduler.schedule()
    assert batch is not None and batch.requests[0] is first
    assert batch.num_new[0] >= 12


def test_where_steps_are_bounded_by_time_an_image_that_sees_ahead_waits_for_room_too() -> None:
    simulation = Simulation(make_config(max_num_batched_tokens=16, max_step_ms=5.0), ms_of=linear_ms)
    for number in range(3):  # what steps take is learnt
        simulation.add(make_request(f"taught {number}", [3 + number] * 9, max_tokens=4, **FREE))
        simulation.run()
    decodes = simulation.add(make_request("decodes", [3, 4], max_tokens=9, **FREE))
    simulation.step()
    # The decode and the text leave 11 tokens.
    text = make_request("text", [9] * 4, max_tokens=1)
    image = request_of("image", (12, b"a"), 2, tower=AHEAD)
    simulation.scheduler.add(text)
    simulation.scheduler.add(image)
    steps = [simulation.scheduler.schedule() for _ in range(2)]
    assert [step.requests for step in steps if step is not None] == [[decodes, text], [decodes, image]]
    assert steps[1] is not None and steps[1].num_new.tolist() == [1, 14]


def test_an_image_that_sees_ahead_and_may_never_find_room_is_refused() -> None:
    scheduler = Scheduler(make_config(max_num_batched_tokens=16))
    with pytest.raises(RequestError, match=r"an image has 14 tokens, .* step has room for 13"):
        scheduler.add(request_of("large", 1, (14, b"a"), 1, tower=AHEAD))
    scheduler.add(request_of("fits", 1, (13, b"a"), 1, tower=AHEAD))


def test_a_hit_within_an_image_that_sees_ahead_leaves_the_rest_of_it_to_one_chunk() -> None:
    scheduler = Scheduler(make_config(max_num_batched_tokens=16, page_size=4))
    chunks(scheduler, request_of("first", 1, (13, b"a"), 1, tower=AHEAD))  # and an answer, in its fourth page
    again = request_of("again", 1, (13, b"a"), 4, tower=AHEAD)
    assert chunks(scheduler, again) == [[6]]
    assert again.num_cached_tokens == 12


def test_a_request_that_only_got_its_row_in_a_lost_step_is_admitted_anew() -> None:
    """A step's parameters and a cached prefix's state for a row are lost with it."""
    scheduler = Scheduler(make_config(max_num_batched_tokens=16, page_size=4, num_snapshots=4))
    waits = request_of("waits", 9, (8, b"b"), 3)
    assert chunks(scheduler, request_of("first", 9, (8, b"b"), 1)) == [[16], [2]]
    busy = request_of("busy", (14, b"a"), 1)
    scheduler.add(busy)
    scheduler.add(waits)
    lost = scheduler.schedule()
    assert lost is not None and lost.requests == [busy] and lost.admitted == [busy, waits]
    assert lost.state_restores[:, 1].tolist() == [waits.row]
    assert scheduler.fail(lost) == [busy]
    again = scheduler.schedule()
    assert again is not None and again.admitted == [waits]
    assert again.state_restores[:, 1].tolist() == [waits.row]
