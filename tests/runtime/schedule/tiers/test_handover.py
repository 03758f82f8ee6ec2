"""A scheduler goes on with prompts that another one has computed, whatever happens to either."""

from __future__ import annotations

import threading
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mllm_compile.runtime.sampling.transfer_params import KVTransferParams
from mllm_compile.runtime.schedule.tiers.handover import HandOver, Whereabouts
from mllm_compile.runtime.schedule.tiers.index import Entry, TierIndex
from mllm_compile.runtime.schedule.tiers.ticket import Ticket
from mllm_compile.runtime.schedule.tiers.tiers import Tiers
from tests.hang_guard import HANG_S
from tests.runtime.schedule.scheduler_simulation import FREE, Simulation, make_config, make_request, prompt_of
from tests.runtime.schedule.tiers.fake_copies import FakeCopies
from tests.runtime.schedule.tiers.test_tiers import settled

WHERE = Whereabouts("prefill", "127.0.0.1", 5)
DECODE = {"do_remote_decode": True}


class CopiesOfOther(FakeCopies):
    """Copies whose tier below is what another scheduler hands over."""

    def take_from(self, sim: Simulation, copies: FakeCopies) -> None:
        self._handover, self._others = handover_of(sim), copies

    def _end(self, ticket: Ticket) -> None:
        for entry in ticket.entries if ticket.kind == "lookup" or ticket.is_load else ():
            key, found = (ticket.is_state, entry.key), self._handover.find(entry.key, ticket.is_state)
            self.below.pop(key, None)
            asked = ticket.source is not None or ticket.kind != "lookup"
            if found is not None and asked:
                self.below[key] = self._others.slots[ticket.is_state, found.slot]
        super()._end(ticket)


def handover_of(sim: Simulation) -> HandOver:
    tiers = sim.scheduler.tiers
    assert tiers is not None and tiers.handover is not None
    return tiers.handover


def prefill(chance: Random, hold_s: float = 60.0, num_slots: int = 64, num_states: int = 0, **config: object):
    sim = Simulation(make_config(**config), steps_ahead=chance.randrange(2))
    copies = FakeCopies(sim.device, chance, chance.choice([0.2, 1.0]))
    host = TierIndex(num_slots), TierIndex(num_states)
    sim.scheduler.use_tiers(Tiers(sim.scheduler.pages, copies, host, b"secret", hands_over=(WHERE, hold_s)))
    return sim, copies


def decode(chance: Random, num_states: int = 0, fails: float = 0.0, **config: object):
    sim = Simulation(make_config(**config), steps_ahead=chance.randrange(2))
    copies = CopiesOfOther(sim.device, chance, chance.choice([0.2, 1.0]), fails)
    host, below = (TierIndex(64), TierIndex(num_states)), (TierIndex(64), TierIndex(64 if num_states else 0))
    tiers = Tiers(sim.scheduler.pages, copies, host, b"secret", below=below, name_below="peers", asks_peers=True)
    sim.scheduler.use_tiers(tiers)
    return sim, copies


def computed(sim: Simulation, name: str, prompt: list[int], salt: tuple = ()):
    return sim.add(make_request(name, prompt, max_tokens=1, salt=salt, kv_transfer_params=DECODE, **FREE))


def test_the_answer_says_where_the_pages_are_and_others_wait_until_they_are_stored() -> None:
    sim, copies = prefill(Random(1))
    copies.ends = 0.0
    request = computed(sim, "first", prompt_of(20))
    while not request.is_finished:
        sim.step()
    told, handover = request.kv_transfer, handover_of(sim)
    assert told == KVTransferParams(
        do_remote_prefill=True, remote_engine_id="prefill", remote_request_id="first", tp_size=1,
        remote_block_ids=(0, 1, 2, 3), remote_host="127.0.0.1", remote_port=5,
    )  # fmt: skip
    keys = list(handover._pending)
    assert len(keys) == 4
    assert [handover.find(key, False) for key in keys] == [None] * 4
    waiting = threading.Thread(target=handover.wait_for, args=(keys, HANG_S))
    waiting.start()
    copies.ends = 1.0
    settled(sim)
    waiting.join()
    entries = [handover.find(key, False) for key in keys]
    assert all(entry is not None and entry.until > 0 for entry in entries)
    handover.fetched(keys[0], False)
    sim.scheduler.schedule()
    assert [entry is not None and entry.until > 0 for entry in entries] == [False, True, True, True]


def test_a_store_that_another_engine_waits_for_is_work_and_not_for_idle_times() -> None:
    sim, copies = prefill(Random(1))
    copies.ends = 0.0
    request = computed(sim, "first", prompt_of(20))
    while not (request.is_finished and not sim.in_flight):
        sim.step()
    while sim.scheduler.has_work():
        sim.step()
    assert sum(len(ticket.entries) for ticket in copies.begun) == 4


def test_pages_that_are_there_are_handed_over_again_and_new_weights_end_it() -> None:
    sim, _ = prefill(Random(2))
    for name in ("first", "again"):
        request = computed(sim, name, prompt_of(20))
        settled(sim)
        assert request.kv_transfer is not None and request.kv_transfer.remote_block_ids == (0, 1, 2, 3)
    handover, closed = handover_of(sim), []
    assert not handover._pending and not handover._promises
    handover.on_close = lambda: closed.append(True)
    sim.scheduler.weights_changed()
    last = computed(sim, "last", prompt_of(20))
    settled(sim)
    assert closed == [True]
    assert last.kv_transfer is not None and last.kv_transfer.remote_block_ids == ()


def test_a_slot_that_is_given_up_is_found_no_more() -> None:
    sim, _ = prefill(Random(3), hold_s=0.0, num_slots=5)
    computed(sim, "first", prompt_of(20))
    settled(sim)
    handover = handover_of(sim)
    held: list[Entry] = list(handover._shelves.host[False])
    computed(sim, "other", prompt_of(20, first=9))
    settled(sim)
    assert any(handover.find(entry.key, False) is not entry for entry in held)
    sim.scheduler.flush_prefix_cache()
    assert all(handover.find(entry.key, False) is None for entry in held)


@pytest.mark.parametrize("states", [False, True])
def test_a_prompt_of_another_is_fetched_at_once_though_computing_would_be_faster(states: bool) -> None:
    kinds = {"num_states": 8, "num_snapshots": 4} if states else {}
    first, of_first = prefill(Random(4), **kinds)
    second, of_second = decode(Random(4), **kinds)
    of_second.take_from(first, of_first)
    request = computed(first, "first", prompt_of(22))
    settled(first)
    params = {"max_tokens": 4, "kv_transfer_params": request.kv_transfer, **FREE}
    gone_on = second.add(make_request("first", prompt_of(22), **params))
    settled(second)
    plain = second.add(make_request("plain", prompt_of(22, first=7), max_tokens=4, **FREE))
    settled(second)
    second.check_answers()
    assert (gone_on.num_cached_tokens, gone_on.disk_tokens, plain.disk_tokens) == (20, 20, 0)
    assert of_second.num_below == (6 if states else 5)


@pytest.mark.parametrize("states", [False, True])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_history_of_two_gives_the_tokens_of_one(states: bool, seed: int) -> None:
    chance = Random(seed)
    kinds = {"num_states": 8, "num_snapshots": 4} if states else {}
    pages = {"num_pages": chance.choice([20, 33])}
    first, of_first = prefill(chance, chance.choice([0.0, 60.0]), chance.choice([6, 64]), **kinds, **pages)
    second, of_second = decode(chance, fails=chance.choice([0.0, 0.2]), **kinds, **pages)
    of_second.take_from(first, of_first)
    begun = []
    for number in range(20):
        prompt = prompt_of(chance.randrange(1, 50), first=chance.randrange(3))
        salt = chance.choice([(), ("other",)])
        begun.append((computed(first, str(number), prompt, salt), prompt, salt))
        for sim in (first, second):
            for _ in range(chance.randrange(8)):
                sim.step()
        for done in [one for one in begun if one[0].is_finished and chance.random() < 0.7]:
            begun.remove(done)
            request, prompt, salt = done
            second.add(
                make_request(
                    request.request_id, prompt, max_tokens=chance.randrange(1, 8), salt=salt,
                    kv_transfer_params=request.kv_transfer,
                )
            )  # fmt: skip
        event = chance.randrange(16)
        sim = chance.choice([first, second])
        if event == 0:
            sim.lose()
        elif event == 1 and sim.requests:
            sim.scheduler.abort(chance.choice(sim.requests))
        elif event == 2:
            sim.scheduler.flush_prefix_cache()
        elif event == 3:
            while sim.in_flight:
                sim.collect()
            sim.scheduler.drop_kv()
    for sim in (first, second):
        settled(sim)
        sim.check_answers()
        sim.check_all_returned()
    assert not handover_of(first)._pending and not handover_of(first)._promises
