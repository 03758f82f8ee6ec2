"""A scheduler with memory behind its KV cache gives the tokens of one without, whatever copies do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mllm_compile.runtime.schedule.pages.page_keys import PageKeys
from mllm_compile.runtime.schedule.tiers.gain import Gain
from mllm_compile.runtime.schedule.tiers.index import Entry, TierIndex
from mllm_compile.runtime.schedule.tiers.loads import Loads
from mllm_compile.runtime.schedule.tiers.tiers import Tiers
from tests.runtime.schedule.scheduler_simulation import FREE, Simulation, make_config, make_request, prompt_of
from tests.runtime.schedule.tiers.fake_copies import FakeCopies


def simulation(
    chance: Random,
    num_slots: int = 64,
    num_states: int = 0,
    ends: float = 0.5,
    fails: float = 0.0,
    num_below: int = 0,
    writes_through: bool = True,
    shared: dict[tuple[bool, bytes], object] | None = None,
    **config: object,
) -> tuple[Simulation, FakeCopies]:
    sim = Simulation(make_config(**config), steps_ahead=chance.randrange(2))
    copies = FakeCopies(sim.device, chance, ends, fails)
    below = None
    if num_below:
        index_of = partial(TierIndex, owns_content=shared is None)
        below = tuple(index_of(num_below, partial(copies.remove, is_state=state)) for state in (False, True))
    if shared is not None:  # a store that others fill too
        copies.below = shared
    host = TierIndex(num_slots), TierIndex(num_states)
    behind = host, b"secret", 0.0, below, writes_through
    tiers = Tiers(sim.scheduler.pages, copies, *behind, asks_below=shared is not None)
    sim.scheduler.use_tiers(tiers)
    return sim, copies


def settled(sim: Simulation) -> None:
    """Runs until nothing is left to do, nor to be copied."""
    sim.run()
    tiers = sim.scheduler.tiers
    assert tiers is not None
    tiers.settle()
    tiers.begin_stores()
    while tiers.is_busy:
        tiers._copies.wait()
        tiers.advance()
        tiers.begin_stores()


def test_a_prompt_whose_pages_are_gone_is_loaded_and_not_computed() -> None:
    sim, copies = simulation(Random(1), num_pages=9)
    first = sim.add(make_request("first", prompt_of(20), max_tokens=2, **FREE))
    settled(sim)
    sim.add(make_request("other", prompt_of(24, first=5), max_tokens=2, **FREE))
    settled(sim)
    again = sim.add(make_request("again", prompt_of(20), max_tokens=2, **FREE))
    settled(sim)
    sim.check_answers()
    assert (first.host_tokens, again.host_tokens, again.num_cached_tokens) == (0, 12, 16), "one page stayed"
    assert copies.num_loaded == 3
    (figures,) = sim.scheduler.stats().tiers
    assert figures.hit_tokens == 12
    sim.check_all_returned()


def test_a_prompt_that_is_looked_at_often_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """40,000 tokens take milliseconds, and one that waits is looked at each time that pages have moved."""
    sim, _ = simulation(Random(3), num_pages=27, max_model_len=128)
    for name, first in (("first", 2), ("other", 5)):
        sim.add(make_request(name, prompt_of(60, first=first), max_tokens=2, **FREE))
        settled(sim)
    monkeypatch.setattr(Gain, "pays", lambda *_: False)
    sim.add(make_request("long", prompt_of(60, first=9), max_tokens=40, **FREE))
    while not sim.scheduler.decodes.requests:
        sim.step()
    hashed: list[int] = []
    chain = PageKeys.chain

    def counted(keys: PageKeys, parent: bytes, token_ids: Sequence[int]) -> list[bytes]:
        if len(token_ids) > 16:  # else it is its first page alone, or what a step has published
            hashed.append(len(token_ids) // 4)
        return chain(keys, parent, token_ids)

    monkeypatch.setattr(PageKeys, "chain", counted)
    again = sim.add(make_request("again", prompt_of(60), max_tokens=2, **FREE))
    for _ in range(20):
        sim.scheduler.rows.changes += 1  # as pages that move have it
        sim.step()
    assert not again.output_token_ids and len(hashed) == 1
    settled(sim)
    sim.check_answers()
    sim.check_all_returned()


def test_pages_that_arrive_have_the_keys_that_their_tokens_have() -> None:
    """They are not hashed again; a wrong one would be another page's name in every tier."""
    sim, copies = simulation(Random(1), num_pages=9)
    for name, prompt in (("first", prompt_of(20)), ("other", prompt_of(24, first=5)), ("again", prompt_of(20))):
        sim.add(make_request(name, prompt, max_tokens=2, **FREE))
        settled(sim)
    assert copies.num_loaded == 3
    cache = sim.scheduler.pages.cache
    run, pages = cache.match_prefix(np.array(prompt_of(20)), ())
    found = [key for one in reversed(list(cache.path_of(run))) for key in one.keys or []]
    keys = PageKeys(b"secret", 4)
    assert found == keys.chain(keys.root(()), prompt_of(20)) and pages.size == len(found) == 5


def test_pages_that_do_not_arrive_are_computed() -> None:
    sim, copies = simulation(Random(2), fails=1.0, num_pages=9)
    for name, prompt in (("first", prompt_of(20)), ("other", prompt_of(24, first=5)), ("again", prompt_of(20))):
        request = sim.add(make_request(name, prompt, max_tokens=2, **FREE))
        settled(sim)
    sim.check_answers()
    assert (copies.num_failed, request.host_tokens) == (3, 0)
    assert sim.scheduler.stats().tiers[0].failed_loads == 3
    sim.check_all_returned()


def test_a_request_that_waits_for_a_load_stops_no_other() -> None:
    sim, copies = simulation(Random(3), num_pages=17)
    for name, prompt in (("first", prompt_of(20)), ("other", prompt_of(60, first=5))):
        sim.add(make_request(name, prompt, max_tokens=2, **FREE))
        settled(sim)
    copies.ends = 0.0
    again = sim.add(make_request("again", prompt_of(20), max_tokens=2, **FREE))
    late = sim.add(make_request("late", prompt_of(7, first=9), max_tokens=3, **FREE))
    for _ in range(12):
        sim.step()
    assert late.is_finished
    assert not again.output_token_ids
    copies.ends = 1.0
    settled(sim)
    sim.check_answers()
    assert again.host_tokens > 0


def test_who_waits_for_pages_of_anothers_load_loads_the_rest_of_its_own() -> None:
    sim, copies = simulation(Random(3), num_pages=41)
    forks = [[*prompt_of(20), *prompt_of(20, first=first)] for first in (5, 9)]
    for number, prompt in enumerate(forks):
        sim.add(make_request(f"before{number}", prompt, max_tokens=2, **FREE))
        settled(sim)
    sim.scheduler.rows.flush_prefix_cache()
    again = [
        sim.add(make_request(f"again{number}", prompt, max_tokens=2, **FREE)) for number, prompt in enumerate(forks)
    ]
    settled(sim)
    sim.check_answers()
    assert [request.num_cached_tokens for request in again] == [36, 36]
    assert copies.num_loaded == 9 + 4, "what both begin with comes once"
    sim.check_all_returned()


@pytest.mark.parametrize("writes_through", [False, True])
def test_what_came_and_went_before_its_request_was_admitted_is_loaded_again(writes_through: bool) -> None:
    sim, copies = simulation(Random(3), writes_through=writes_through, num_pages=17, max_running_requests=1)
    sim.add(make_request("before", prompt_of(20), max_tokens=2, **FREE))
    settled(sim)
    sim.scheduler.rows.flush_prefix_cache()
    copies.ends = 0.0
    again = sim.add(make_request("again", prompt_of(20), max_tokens=2, **FREE))
    late = sim.add(make_request("late", prompt_of(7, first=9), max_tokens=55, **FREE))
    sim.step()
    copies.ends = 1.0
    settled(sim)
    sim.check_answers()
    assert late.first_token_time < again.first_token_time
    assert again.num_cached_tokens == again.host_tokens == 16
    assert copies.num_loaded == 8, "the answer had taken the pages of the first load"
    sim.check_all_returned()


@pytest.mark.parametrize("writes_through", [False, True])
def test_what_the_host_gives_up_comes_back_from_below(writes_through: bool) -> None:
    sim, copies = simulation(Random(4), num_slots=6, num_below=64, writes_through=writes_through, num_pages=9)
    for number in (1, 2, 3, 4, 1, 2):
        sim.add(make_request(str(number), prompt_of(20, first=number), max_tokens=2, **FREE))
        settled(sim)
    sim.check_answers()
    assert copies.num_below > 0
    assert any(request.disk_tokens for request in sim.requests)
    _, disk = sim.scheduler.stats().tiers
    assert (disk.name, disk.hit_tokens > 0) == ("disk", True)
    sim.check_all_returned()
    assert not copies.below, "a flush forgets it too"


@pytest.mark.parametrize(
    ("loads", "num_cached", "by_tier"),
    [
        ([(0, 4), (4, 0)], 4, (4, 0)),  # given up, and loaded again
        ([(0, 4), (2, 0)], 6, (2, 4)),
        ([(3, 2)], 4, (2, 2)),
        ([], 4, (0, 0)),
    ],
)
def test_cached_pages_count_for_the_tier_that_they_came_from_last(
    loads: list[tuple[int, int]], num_cached: int, by_tier: tuple[int, int]
) -> None:
    sim, _ = simulation(Random(1))
    request = make_request("one", prompt_of(20))
    found = sim.scheduler.tiers._loads
    found._tried[request] = loads
    assert found.pages_for(request, num_cached) == by_tier


def test_the_end_writes_all_below() -> None:
    sim, copies = simulation(Random(5), num_below=64, writes_through=False)
    sim.add(make_request("first", prompt_of(20), max_tokens=2, **FREE))
    settled(sim)
    assert not copies.below
    sim.scheduler.close()
    assert len(copies.below) == 5


def test_new_weights_end_the_use_of_the_tier_below() -> None:
    sim, copies = simulation(Random(6), num_below=64)
    sim.add(make_request("first", prompt_of(20), max_tokens=2, **FREE))
    settled(sim)
    assert len(copies.below) == 5
    sim.scheduler.weights_changed()
    sim.add(make_request("second", prompt_of(20, first=9), max_tokens=2, **FREE))
    settled(sim)
    sim.scheduler.close()
    assert len(copies.below) == 5
    assert [tier.name for tier in sim.scheduler.stats().tiers] == ["host"]


def test_pages_of_an_engine_before_are_told_once_they_were_used() -> None:
    first, before = simulation(Random(14))
    first.add(make_request("first", prompt_of(20), max_tokens=2, **FREE))
    settled(first)
    sim, copies = simulation(Random(14))
    tiers, told = sim.scheduler.tiers, []
    assert tiers is not None and first.scheduler.tiers is not None
    copies.slots = before.slots
    held = list(first.scheduler.tiers._shelves.host[False])
    tiers._shelves.host[False].restore(held)
    tiers.watch(lambda *one: told.append(one))
    again = sim.add(make_request("again", prompt_of(20), max_tokens=2, **FREE))
    settled(sim)
    sim.check_answers()
    assert again.host_tokens == 16
    used = [entry.key for entry in held if entry.depth <= again.host_tokens]
    assert {one for one in told if one[1] in used} == {("host", key, True) for key in used}


def test_a_flush_behind_new_weights_removes_what_is_below_and_can_no_longer_be_hit() -> None:
    sim, copies = simulation(Random(6), num_below=64)
    sim.add(make_request("first", prompt_of(20), max_tokens=2, **FREE))
    settled(sim)
    sim.scheduler.weights_changed()
    assert len(copies.below) == 5
    sim.scheduler.flush_prefix_cache()
    assert not copies.below


def test_pages_that_another_engine_has_stored_are_found_by_a_lookup() -> None:
    shared: dict[tuple[bool, bytes], object] = {}
    for name in ("first", "second"):
        sim, copies = simulation(Random(8), num_below=64, shared=shared)
        request = sim.add(make_request(name, prompt_of(20), max_tokens=2, **FREE))
        settled(sim)
        sim.check_answers()
    assert (request.disk_tokens, copies.num_lookups) == (16, 1)
    held = len(shared)
    sim.scheduler.weights_changed()
    sim.add(make_request("third", prompt_of(20, first=5), max_tokens=2, **FREE))
    settled(sim)
    assert (copies.num_lookups, len(shared)) == (1, held), "values of other weights are neither asked for nor stored"


def test_a_request_waits_for_its_lookup_alone_and_one_that_leaves_is_forgotten() -> None:
    sim, copies = simulation(Random(9), ends=0.0, num_below=64, shared={})
    request = sim.add(make_request("first", prompt_of(20), max_tokens=2, **FREE))
    short = sim.add(make_request("short", prompt_of(3, first=7), max_tokens=2, **FREE))
    for _ in range(8):
        sim.step()
    assert short.is_finished and not request.output_token_ids
    sim.scheduler.abort(request)
    copies.ends = 1.0
    settled(sim)
    sim.check_all_returned()


def test_a_request_that_waits_for_room_behind_its_lookup_is_not_gone_through_for_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim, copies = simulation(Random(12), ends=1.0, num_below=64, shared={}, num_pages=9)
    sim.add(make_request("first", prompt_of(20), max_tokens=8, **FREE))
    sim.step()
    gone_through: list[int] = []
    path = Loads._path

    def counted(loads: Loads, known: Sequence[bytes], parent: bytes, keys: Sequence[bytes]) -> list[Entry]:
        gone_through.append(len(keys))
        return path(loads, known, parent, keys)

    monkeypatch.setattr(Loads, "_path", counted)
    late = sim.add(make_request("late", prompt_of(24, first=5), max_tokens=2, **FREE))
    for _ in range(5):
        sim.step()
    assert not late.output_token_ids
    settled(sim)
    sim.check_answers()
    assert (copies.num_lookups, len(gone_through)) == (2, 1)


def test_pages_that_a_store_has_forgotten_since_the_lookup_are_computed() -> None:
    shared: dict[tuple[bool, bytes], object] = {}
    for name in ("first", "second"):
        sim, copies = simulation(Random(10), num_below=64, shared=shared)
        request = sim.add(make_request(name, prompt_of(20), max_tokens=2, **FREE))
        while name == "second" and not any(ticket.is_load for ticket in copies.begun):
            copies.ends = float(any(ticket.kind == "lookup" for ticket in copies.begun))
            sim.step()
        if name == "second":
            shared.clear()
        copies.ends = 1.0
        settled(sim)
        sim.check_answers()
    assert (request.disk_tokens, sim.scheduler.stats().tiers[1].failed_loads) == (0, 4)
    sim.check_all_returned()


@pytest.mark.parametrize("call", ["begin", "finished", "wait"])
def test_a_device_that_is_lost_amid_copies_hinders_no_end(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sim, copies = simulation(Random(13), num_below=64)
    tiers, closed = sim.scheduler.tiers, []
    sim.add(make_request("first", prompt_of(20), max_tokens=2, **FREE))
    settled(sim)
    sim.add(make_request("second", prompt_of(20, first=5), max_tokens=2, **FREE))

    def lost(*_: object) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(copies, call, lost)
    monkeypatch.setattr(copies, "close", lambda: closed.append(True))
    with pytest.raises(RuntimeError, match="the device is lost"):
        settled(sim)
    assert tiers is not None
    tiers.close()
    tiers.close()
    assert closed == [True]


@pytest.mark.parametrize(("num_pages", "begun"), [(65, [0, 0, 5]), (41, [0, 5, 5]), (13, [5, 5, 5])])
def test_stores_begin_beside_decodes_unless_they_are_many_or_the_step_could_take_their_pages(
    num_pages: int, begun: list[int]
) -> None:
    sim, copies = simulation(Random(7), ends=0.0, num_pages=num_pages, max_num_batched_tokens=32)
    sim.add(make_request("first", prompt_of(20), max_tokens=1, **FREE))
    while sim.scheduler.has_work():
        sim.step()
    assert not copies.begun and sim.scheduler.has_idle_work
    sim.add(make_request("next", prompt_of(20, first=5), max_tokens=3, **FREE))
    found = []
    for num_decodes in (0, 1, 1):  # the prompt's step, then one beside it, then one beside decodes alone
        batch = sim.plan()
        assert batch is not None and batch.num_decodes == num_decodes
        found.append(sum(len(ticket.entries) for ticket in copies.begun))
    assert found == begun and not sim.scheduler.has_idle_work
    copies.ends = 1.0
    settled(sim)
    sim.check_answers()


@pytest.mark.parametrize("is_long", [True, False])
def test_pages_are_stored_before_a_prompt_that_is_larger_than_what_is_free_has_them_dropped(is_long: bool) -> None:
    """A long prompt's pages are made free at once: more than its first step computes."""
    sim, copies = simulation(
        Random(7), ends=0.0, num_pages=41, max_num_batched_tokens=16, max_model_len=256, num_slots=128
    )
    sim.scheduler.pages._long = 2 if is_long else 1000
    sim.add(make_request("first", prompt_of(20), max_tokens=1, **FREE))
    while sim.scheduler.has_work():
        sim.step()
    assert not copies.begun and sim.scheduler.has_idle_work
    sim.add(make_request("long", prompt_of(146, first=5), max_tokens=2, **FREE))
    copies.ends = 1.0
    settled(sim)
    again = sim.add(make_request("again", prompt_of(20), max_tokens=2, **FREE))
    settled(sim)
    assert again.num_cached_tokens == 16, "in the cache or in the memory"
    assert again.host_tokens
    sim.check_answers()
    sim.check_all_returned()


def test_writes_below_begin_and_steps_are_learnt_from_beside_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    sim, copies = simulation(Random(7), ends=0.0, num_below=64, num_pages=129, max_num_batched_tokens=8)
    sim.ms_of = lambda batch: 1.0
    sim.add(make_request("first", prompt_of(20), max_tokens=1, **FREE))
    sim.run()
    learnt = []
    monkeypatch.setattr(Gain, "computed", lambda gain, batch, ms: learnt.append(batch.step_id))
    sim.add(make_request("next", prompt_of(40, first=5), max_tokens=1, **FREE))
    assert [ticket.kind for ticket in copies.begun] == ["store"] * len(copies.begun)
    copies.wait()
    for _ in range(4):
        batch = sim.plan()
        assert batch is not None and batch.num_prompt_tokens
        if len(sim.in_flight) > 1:
            sim.collect()
    assert {ticket.kind for ticket in copies.begun} == {"write"} and learnt
    copies.ends = 1.0
    settled(sim)
    sim.check_answers()


def test_pages_of_an_answer_are_stored_though_nobody_asks_for_more() -> None:
    sim, copies = simulation(Random(7), ends=0.0)
    sim.add(make_request("first", prompt_of(8), max_tokens=9, **FREE))
    sim.run()
    stored = {entry.key for ticket in copies.begun for entry in ticket.entries}
    assert len(stored) == 4


def test_who_waits_for_all_copies_does_not_wait_for_what_is_to_be_written_below(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim, copies = simulation(Random(8), num_below=64, ends=0.0)
    sim.add(make_request("first", prompt_of(60), max_tokens=2, **FREE))
    sim.run()
    begin, begun = copies.begin, []
    monkeypatch.setattr(copies, "begin", lambda ticket: (begun.append(ticket), begin(ticket)))
    sim.scheduler.tiers.settle()
    assert not sim.scheduler.tiers.is_busy
    assert not [ticket for ticket in begun if ticket.kind == "write"]
    settled(sim)
    assert len(copies.below) == 15


def test_a_request_behind_others_loads_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sim, copies = simulation(Random(9), num_pages=65)
    for number in (1, 2, 3):
        sim.add(make_request(f"first{number}", prompt_of(20, first=number), max_tokens=2, **FREE))
    settled(sim)
    sim.scheduler.drop_kv()
    copies.ends = 0.0
    again = [
        sim.add(make_request(f"again{number}", prompt_of(20, first=number), max_tokens=2, **FREE))
        for number in (1, 2, 3)
    ]
    sim.step()
    cache, looked_up = sim.scheduler.pages.cache, []
    match = cache.match_prefix
    monkeypatch.setattr(cache, "match_prefix", lambda *given: (looked_up.append(given), match(*given))[1])
    for _ in range(5):
        sim.step()
    assert not looked_up
    copies.ends = 1.0
    settled(sim)
    sim.check_answers()
    assert all(request.host_tokens for request in again)


def test_slots_are_looked_at_for_what_goes_below_when_some_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    sim, _ = simulation(Random(10), num_slots=8, num_below=64, writes_through=False)
    sim.add(make_request("first", prompt_of(30), max_tokens=2, **FREE))
    settled(sim)
    tiers, looked_at = sim.scheduler.tiers, []
    oldest = TierIndex.oldest
    monkeypatch.setattr(TierIndex, "oldest", lambda *given: (looked_at.append(given), oldest(*given))[1])
    tiers.begin_stores()
    assert not looked_at
    sim.add(make_request("second", prompt_of(30, first=5), max_tokens=2, **FREE))
    settled(sim)
    assert looked_at


def test_pages_that_others_follow_go_behind_them_whatever_the_order_of_their_use() -> None:
    index, root = TierIndex(60), b"root"
    shared = [b"s%d" % place for place in range(20)]
    ends = {name: [*shared, *(b"%s%d" % (name, place) for place in range(20))] for name in (b"a", b"b")}

    def put(path: list[bytes]) -> None:
        for depth, (parent, key) in enumerate(pairwise([root, *path]), start=1):
            if key not in index:
                (slot,) = index.take(1)
                index.put(Entry(key, parent, path[0], depth, slot))

    put(ends[b"a"])
    put(ends[b"b"])
    while len(index) > 20:
        index.drop(index._victim())
        for path in ends.values():
            held = [key in index for key in path]
            assert held == sorted(held, reverse=True), "a path has no hole"
    assert all(key in index for key in shared)


def test_a_copy_that_was_slow_once_does_not_end_loads_for_good() -> None:
    gain = Gain(1.0)
    gain._cost = SimpleNamespace(knows_prompts=True, token_ms=1.0, pair_ms=0.0)
    gain.loaded(1000, 60.0, from_below=False)
    answers = [gain.pays(0, 1000, 1000, 0) for _ in range(300)]
    assert not answers[0]
    assert answers[-1]


@pytest.mark.parametrize("states", [False, True])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_history_gives_the_tokens_of_a_run_without_tiers(states: bool, seed: int) -> None:
    chance = Random(seed)
    sim, copies = simulation(
        chance,
        num_slots=chance.choice([3, 8, 64]),
        num_states=chance.choice([1, 4]) if states else 0,
        ends=chance.choice([0.1, 0.5, 1.0]),
        fails=chance.choice([0.0, 0.0, 0.2]),
        num_below=chance.choice([0, 5, 64]),
        writes_through=chance.choice([False, True]),
        shared=chance.choice([None, {}]),
        num_pages=chance.choice([17, 20, 33]),
        num_snapshots=4 if states else 0,
    )
    for number in range(30):
        length = chance.randrange(1, 50)
        prompt = prompt_of(length, first=chance.randrange(3))
        salt = chance.choice([(), (), ("other",)])
        sim.add(make_request(str(number), prompt, max_tokens=chance.randrange(1, 12), salt=salt))
        for _ in range(chance.randrange(6)):
            sim.step()
        event = chance.randrange(24)
        if event > 20 and copies.below and sim.scheduler.tiers._shelves.asks_below:  # others make room there
            copies.below.pop(chance.choice(list(copies.below)))
        if event == 0:
            sim.lose()
        elif event == 1:
            sim.scheduler.abort(chance.choice(sim.requests))
        elif event == 2:
            sim.scheduler.flush_prefix_cache()
        elif event == 3:
            while sim.in_flight:
                sim.collect()
            sim.scheduler.drop_kv()
    settled(sim)
    sim.check_answers()
    sim.check_all_returned()
