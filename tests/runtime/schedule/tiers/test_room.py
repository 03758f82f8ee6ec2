"""Pages that the KV cache gives up go to the host's memory first, and both have different ones."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from mllm_compile.runtime.schedule.pages.sessions import SessionTag
from mllm_compile.runtime.schedule.tiers.index import Entry, TierIndex
from mllm_compile.runtime.schedule.tiers.prompt_keys import PromptKeys
from tests.runtime.schedule.scheduler_simulation import FREE, Simulation, make_request, prompt_of
from tests.runtime.schedule.tiers.fake_copies import FakeCopies
from tests.runtime.schedule.tiers.test_tiers import settled, simulation


def filled(num_prompts: int, num_slots: int, **options: object) -> tuple[Simulation, FakeCopies]:
    """A scheduler with 16 pages, whose memory was written back while so many prompts of 5 pages came."""
    sim, copies = simulation(Random(1), num_slots=num_slots, writes_through=False, num_pages=17, **options)
    for number in range(num_prompts):
        sim.add(make_request(f"first{number}", prompt_of(20, first=number), max_tokens=2, **FREE))
        settled(sim)
    return sim, copies


def test_cache_and_memory_together_have_what_neither_could_hold() -> None:
    sim, _ = filled(6, num_slots=20)
    again = []
    for number in range(6):
        again.append(sim.add(make_request(f"again{number}", prompt_of(20, first=number), max_tokens=2, **FREE)))
        settled(sim)
    sim.check_answers()
    assert [request.num_cached_tokens for request in again] == [16] * 6, "of 30 pages, behind 16 and 20"
    sim.check_all_returned()


def test_what_is_written_through_is_in_both() -> None:
    sim, _ = simulation(Random(1), num_slots=20, writes_through=True, num_pages=17)
    for number in range(6):
        sim.add(make_request(str(number), prompt_of(20, first=number), max_tokens=2, **FREE))
        settled(sim)
    again = sim.add(make_request("again", prompt_of(20, first=0), max_tokens=2, **FREE))
    settled(sim)
    assert again.num_cached_tokens == 0


def test_a_request_waits_for_its_room_while_others_run_and_no_page_is_lost() -> None:
    sim, copies = filled(3, num_slots=8)
    copies.ends = 0.0
    allocator = sim.scheduler.pages.allocator
    short = sim.add(make_request("short", prompt_of(3, first=7), max_tokens=6, **FREE))
    sim.step()
    late = sim.add(make_request("late", prompt_of(40, first=9), max_tokens=2, **FREE))
    for _ in range(12):
        sim.step()
    assert short.is_finished
    assert not late.output_token_ids
    on_their_way = {page for ticket in copies.begun for page in ticket.pages.tolist()}
    assert on_their_way
    assert allocator.taken[list(on_their_way)].all(), "no step may write them before"
    copies.ends = 1.0
    settled(sim)
    sim.check_answers()
    sim.check_all_returned()


def test_a_request_waits_for_pages_that_are_leaving_the_cache() -> None:
    sim, copies = filled(3, num_slots=40)
    sim.scheduler.tiers._shelves.host[False].clear()
    copies.ends = 0.0
    sim.add(make_request("late", prompt_of(40, first=9), max_tokens=2, **FREE))
    sim.step()
    (leaving,) = (ticket for ticket in copies.begun)
    again = sim.add(make_request("again", prompt_of(20, first=0), max_tokens=2, **FREE))
    for _ in range(4):
        sim.step()
    assert not again.output_token_ids
    assert not leaving.is_load
    copies.ends = 1.0
    settled(sim)
    sim.check_answers()
    assert again.host_tokens > 0
    sim.check_all_returned()


def test_no_keys_are_made_for_a_request_that_waits_behind_others(monkeypatch: pytest.MonkeyPatch) -> None:
    sim, copies = filled(3, num_slots=8)
    copies.ends = 0.0
    sim.add(make_request("late", prompt_of(40, first=9), max_tokens=2, **FREE))
    sim.step()
    first, asked = PromptKeys.first, list[Any]()
    monkeypatch.setattr(
        PromptKeys, "first", lambda keys, request, *of: [asked.append(request), first(keys, request, *of)][1]
    )
    behind = sim.add(make_request("behind", prompt_of(20, first=0), max_tokens=2, **FREE))
    sim.step()
    assert sim.scheduler.tiers._room.is_for(behind)
    assert behind not in asked
    copies.ends = 1.0
    settled(sim)
    sim.check_answers()
    assert behind in asked
    sim.check_all_returned()


def test_a_request_that_leaves_amid_its_wait_keeps_nothing() -> None:
    sim, copies = filled(3, num_slots=8)
    copies.ends = 0.0
    late = sim.add(make_request("late", prompt_of(40, first=9), max_tokens=2, **FREE))
    sim.step()
    sim.scheduler.abort(late)
    copies.ends = 1.0
    settled(sim)
    sim.check_all_returned()


def test_what_is_free_for_a_request_is_free_for_more_urgent_ones() -> None:
    sim, _ = filled(1, num_slots=64)
    low = sim.add(make_request("low", prompt_of(30, first=9), max_tokens=2, priority=1, **FREE))
    sim.scheduler.tiers._room._grant(low, 9)  # as behind a wait
    high = sim.add(make_request("high", prompt_of(20, first=5), max_tokens=2, **FREE))
    assert sim.step().admitted[0] is high
    settled(sim)
    sim.check_answers()
    sim.check_all_returned()


def test_a_request_waits_for_more_room_where_its_load_was_given_up() -> None:
    sim, copies = filled(3, num_slots=8)
    copies.ends = 0.0
    room = sim.scheduler.tiers._room
    late = sim.add(make_request("late", prompt_of(40, first=9), max_tokens=2, **FREE))
    room._grant(late, 1)  # as a load that brought all but one page has left it
    sim.step()
    assert room.is_for(late)
    assert room._granted[late] == room._num_granted > 9
    copies.ends = 1.0
    settled(sim)
    sim.check_answers()
    assert not room._granted
    sim.check_all_returned()


def test_pages_behind_the_last_state_are_no_room_for_who_computes_them_anew() -> None:
    options = {"num_states": 1, "num_pages": 17, "num_snapshots": 1, "max_num_batched_tokens": 64}
    sim, copies = simulation(Random(1), num_slots=4, writes_through=False, **options)
    for number in range(2):  # the second one's state is the only one then
        sim.add(make_request(f"first{number}", prompt_of(20, first=number), max_tokens=2, **FREE))
        settled(sim)
    copies.ends = 0.0
    again = sim.add(make_request("again", prompt_of(20, first=0) + prompt_of(16, first=3), max_tokens=2, **FREE))
    sim.step()
    wish = sim.scheduler.tiers._room._wish
    assert wish is not None
    assert (wish.request, wish.run, wish.num_pages) == (again, None, 9), "the cached pages are of no use without it"
    copies.ends = 1.0
    settled(sim)
    sim.check_answers()
    sim.check_all_returned()


def test_however_many_requests_wait_for_room_few_are_looked_at_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    sim, copies = filled(3, num_slots=8)
    copies.ends = 0.0
    for number in range(200):
        sim.add(make_request(f"late{number}", prompt_of(40, first=number), max_tokens=2, **FREE))
    admission, looked_at = sim.scheduler.admission, list[object]()
    waits = admission.waits_for_load

    def look(*given: Any) -> bool:
        looked_at.append(given)
        return waits(*given)

    monkeypatch.setattr(admission, "waits_for_load", look)
    sim.step()
    assert copies.begun
    assert len(looked_at) == 64
    copies.ends = 1.0
    settled(sim)
    sim.check_answers()
    sim.check_all_returned()


@pytest.mark.parametrize("num_slots", [8, 64])
def test_memory_that_is_let_go_leaves_what_was_used_last(num_slots: int) -> None:
    """As sleep lets it go: pages that the cache alone has are stored before."""
    sim, _ = filled(4, num_slots=num_slots)
    sim.scheduler.drop_kv()
    held = {entry.key for entry in sim.scheduler.tiers._shelves.host[False]}
    assert len(held) == min(num_slots, 20)
    last = sim.add(make_request("last", prompt_of(20, first=3), max_tokens=2, **FREE))
    settled(sim)
    sim.check_answers()
    assert last.host_tokens == 16


def test_memory_that_is_let_go_leaves_nothing_that_was_forgotten() -> None:
    """The cache still has the pages of what may be no numbers, until others need them."""
    sim, _ = simulation(Random(1), num_slots=64, writes_through=False, num_pages=33)
    sim.add(make_request("first", prompt_of(20), max_tokens=2, **FREE))
    settled(sim)
    broken = sim.add(make_request("broken", prompt_of(24), max_tokens=8, **FREE))
    sim.step()
    sim.scheduler._lifecycle.end_broken(broken, -1)
    settled(sim)
    assert sim.scheduler.pages.cache.num_pages
    sim.scheduler.drop_kv()
    assert not len(sim.scheduler.tiers._shelves.host[False])
    again = sim.add(make_request("again", prompt_of(20), max_tokens=2, **FREE))
    settled(sim)
    assert again.num_cached_tokens == 0


def test_pages_that_came_from_below_are_known_to_be_in_both() -> None:
    sim, _ = filled(6, num_slots=8, num_below=64)
    again = sim.add(make_request("again", prompt_of(20, first=0), max_tokens=2, **FREE))
    settled(sim)
    assert again.disk_tokens
    shelves = sim.scheduler.tiers._shelves
    run, _ = sim.scheduler.pages.cache.match_prefix(again.cache_keys, again.cache_salt)
    in_both = {key for key in shelves.path_keys(run) if key in shelves.host[False]}
    assert in_both
    assert in_both <= set(shelves.host[False]._above)


@pytest.mark.parametrize("num_slots", [8, 64])
def test_the_end_writes_what_the_cache_alone_has_below(num_slots: int) -> None:
    sim, copies = filled(3, num_slots=num_slots, num_below=64)
    sim.scheduler.close()
    assert len(copies.below) == 15


@pytest.mark.parametrize("writes_through", [False, True])
def test_pages_of_a_session_that_is_over_go_first_once_the_cache_gave_them_up(writes_through: bool) -> None:
    sim, _ = simulation(Random(1), writes_through=writes_through, num_pages=17)
    request = make_request("last", prompt_of(20), max_tokens=2, **FREE)
    request.session_tag = SessionTag("session")
    sim.add(request)
    settled(sim)
    host = sim.scheduler.tiers._shelves.host[False]
    of_session = list(host)
    sim.scheduler.end_session("session")
    for number in range(4):
        sim.add(make_request(f"other{number}", prompt_of(20, first=10 + number), max_tokens=2, **FREE))
        settled(sim)
    assert len(of_session) == 5
    assert all(host.get(entry.key) is entry and entry.is_ended for entry in of_session)


def test_of_what_both_have_that_goes_first_which_the_cache_got_last() -> None:
    index = TierIndex(4)
    for name in (b"a", b"b", b"c", b"d"):
        (slot,) = index.take(1)
        index.put(Entry(name, b"root", name, 4, slot))
    index.note_above([b"b", b"c"], is_above=True)
    index.take(1)
    assert [entry.key for entry in index] == [b"a", b"b", b"d"]
    index.note_above([b"b"], is_above=False)
    index.take(2)
    assert b"a" not in index, "the least recently used one"
