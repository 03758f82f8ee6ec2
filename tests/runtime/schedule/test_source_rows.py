"""Pages of sources: taken whole with a row, given back with it, shared by their digest, forgotten with a lost step."""

from __future__ import annotations

import numpy as np
import pytest

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.schedule.scheduler import Scheduler
from mllm_compile.runtime.sources.request import RequestSource
from tests.runtime.schedule.scheduler_simulation import FREE, make_config, make_request

PAGE = 4
TOKEN = 5


def scheduler_of(**changes: object) -> Scheduler:
    return Scheduler(make_config(max_source_len=20, page_size=PAGE, **changes))


def request_of(name: str, length: int, first: int = 10, prompt: int = 1, max_tokens: int = 6) -> Request:
    request = make_request(name, [2] * prompt, max_tokens=max_tokens, **FREE)
    request.source = RequestSource.of_text(np.arange(first, first + length))
    return request


def run(scheduler: Scheduler, *requests: Request) -> list[ScheduledBatch]:
    """Runs requests to their end."""
    for request in requests:
        scheduler.add(request)
    batches = []
    while (batch := scheduler.schedule()) is not None:
        batches.append(batch)
        scheduler.update(batch, np.full(batch.num_requests, TOKEN, dtype=np.int64))
    scheduler.finish_update()
    return batches


def encoded(batches: list[ScheduledBatch]) -> list[str]:
    return [request.request_id for batch in batches for request in batch.encoded]


def test_a_source_has_a_row_behind_those_of_requests_and_as_many_pages_as_states() -> None:
    scheduler = scheduler_of(enable_prefix_cache=False)
    scheduler.add(request_of("a", 9))
    batch = scheduler.schedule()
    assert batch is not None
    num_rows = scheduler.config.max_running_requests + 1
    of_source = batch.page_rows == num_rows + batch.rows[0]
    assert batch.page_positions[of_source].tolist() == [0, 1, 2]
    assert scheduler.stats().pages_used == 3 + 1


def test_pages_come_back_with_the_row() -> None:
    scheduler = scheduler_of(enable_prefix_cache=False)
    batches = run(scheduler, *(request_of(str(number), 9 + number) for number in range(6)))
    assert encoded(batches) == [str(number) for number in range(6)]
    assert scheduler.stats().pages_used == 0
    assert scheduler.pages.allocator.available_pages == scheduler.config.usable_pages


def test_requests_of_one_source_share_its_pages_from_the_first_step_on() -> None:
    scheduler = scheduler_of()
    for name in ("a", "b"):
        scheduler.add(request_of(name, 12))
    batch = scheduler.schedule()
    assert batch is not None
    assert [request.request_id for request in batch.encoded] == ["a"]
    assert scheduler.stats().pages_used == 3 + 2
    of_source = batch.page_rows > scheduler.config.max_running_requests
    assert len(set(batch.page_ids[of_source].tolist())) == 3
    assert of_source.sum() == 6


def test_a_prefix_is_shared_within_one_source_alone() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=64)
    first, again, other = (request_of(name, 8, first, prompt=9) for name, first in (("a", 10), ("b", 10), ("c", 11)))
    run(scheduler, first)
    run(scheduler, again, other)
    assert (again.num_cached_tokens, other.num_cached_tokens) == (2 * PAGE, 0)


def test_a_source_whose_pages_went_is_read_again() -> None:
    scheduler = scheduler_of(num_pages=9)
    assert encoded(run(scheduler, request_of("a", 12), request_of("b", 20, 50), request_of("c", 12))) == ["a", "b", "c"]


def test_a_lost_step_takes_its_sources_out_of_the_cache() -> None:
    scheduler = scheduler_of()
    lost = request_of("lost", 12)
    scheduler.add(lost)
    batch = scheduler.schedule()
    assert batch is not None
    assert scheduler.fail(batch) == [lost]
    assert encoded(run(scheduler, request_of("again", 12))) == ["again"]


def test_a_source_of_a_lost_step_is_read_again_for_a_request_that_was_preempted_since() -> None:
    scheduler = scheduler_of()
    preempted = request_of("preempted", 12)
    scheduler.add(preempted)
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.retract()
    assert not scheduler.fail(batch)
    assert encoded(run(scheduler)) == ["preempted"]
    assert len(preempted.output_token_ids) == preempted.max_new_tokens


def test_who_shares_a_source_of_a_lost_step_ends_with_its_later_step_or_begins_anew() -> None:
    scheduler = scheduler_of()
    lost, shares, other = request_of("lost", 12), request_of("shares", 12), request_of("other", 12, first=50)
    scheduler.add(lost)
    first = scheduler.schedule()
    scheduler.add(shares)
    scheduler.add(other)
    second = scheduler.schedule()
    assert first is not None and second is not None
    assert shares in second.requests and encoded([first, second]) == ["lost", "other"]
    assert scheduler.fail(first) == [lost, shares]
    scheduler.update(second, np.full(second.num_requests, TOKEN, dtype=np.int64))
    assert not shares.output_token_ids and len(other.output_token_ids) == 1
    assert encoded(run(scheduler, request_of("again", 12))) == ["again"]
    assert len(other.output_token_ids) == other.max_new_tokens


def test_a_broken_request_takes_its_source_out_of_the_cache() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of("broken", 12))
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.update(batch, np.full(1, TOKEN, dtype=np.int64), broken_rows=(0,))
    assert encoded(run(scheduler, request_of("again", 12))) == ["again"]


def test_preempted_requests_find_their_source_or_read_it_again() -> None:
    scheduler = scheduler_of(num_pages=12, enable_prefix_cache=False)
    requests = [request_of(str(number), 12, 10 + number, max_tokens=20) for number in range(3)]
    batches = run(scheduler, *requests)
    assert scheduler.stats().preemptions > 0
    assert len(encoded(batches)) > len(requests)
    assert all(len(request.output_token_ids) == 20 for request in requests)
    assert scheduler.stats().pages_used == 0


def test_the_encoder_takes_of_a_steps_budget() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=16)
    for number in range(4):
        scheduler.add(request_of(str(number), 12, 10 + number))
    batch = scheduler.schedule()
    assert batch is not None
    assert [request.request_id for request in batch.encoded] == ["0", "1"]


def test_the_encoder_takes_of_the_budget_beside_a_prompt_that_is_cut() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=40)
    long = request_of("long", 4, prompt=60)
    shorter = [request_of(str(number), 12, 20 + number, prompt=2) for number in range(4)]
    for request in (long, *shorter):
        scheduler.add(request)
    batch = scheduler.schedule()
    assert batch is not None
    assert [request.request_id for request in batch.encoded] == ["long", "0", "1"]  # 2 * (12 + 2) of half of 40
    assert {request.request_id: int(new) for request, new in zip(batch.requests, batch.num_new, strict=True)} == {
        "long": 20,
        "0": 2,
        "1": 2,
    }


def test_a_shorter_prompt_leaves_the_pages_that_the_first_in_line_needs_for_its_source() -> None:
    scheduler = scheduler_of(num_pages=21, max_num_batched_tokens=16, enable_prefix_cache=False)
    long = request_of("long", 4, prompt=40)  # 1 + 10 of 20 pages
    first, shorter = request_of("first", 20, 50, prompt=12), request_of("shorter", 8, 80, prompt=4)
    for request in (long, first, shorter):  # first: 5 + 3, shorter: 2 + 1
        scheduler.add(request)
    batch = scheduler.schedule()
    assert batch is not None
    assert [request.request_id for request in batch.requests] == ["long"]


def test_a_broken_request_takes_a_source_that_it_found_out_of_the_cache() -> None:
    scheduler = scheduler_of()
    run(scheduler, request_of("reader", 12))
    scheduler.add(request_of("broken", 12))
    batch = scheduler.schedule()
    assert batch is not None
    assert not batch.encoded
    scheduler.update(batch, np.full(1, TOKEN, dtype=np.int64), broken_rows=(0,))
    assert encoded(run(scheduler, request_of("again", 12))) == ["again"]


@pytest.mark.parametrize(
    ("length", "max_tokens", "said"),
    [
        (21, 4, "encoder's prompt has 21 tokens; expected at most 20"),
        (20, 40, r"needs 15 KV pages of 4 tokens \(5 of them for images, .* that it attends to\), but only 8"),
    ],
)
def test_what_could_never_run_is_refused(length: int, max_tokens: int, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        scheduler_of(num_pages=9).add(request_of("a", length, max_tokens=max_tokens))
