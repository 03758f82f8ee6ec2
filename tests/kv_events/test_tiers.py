"""Events tell of pages that tiers hold, with their tokens, and of those that they hold no more."""

from __future__ import annotations

from random import Random

import pytest

from mllm_compile.engine.core.page_events import PageEvents
from mllm_compile.kv_events.blocks import Blocks, name_of
from mllm_compile.kv_events.news import Gone
from mllm_compile.kv_events.wire import AllBlocksCleared, Batch, encode
from tests.kv_events.readers import Typed
from tests.runtime.schedule.scheduler_simulation import FREE, make_request, prompt_of
from tests.runtime.schedule.tiers.test_tiers import settled, simulation


class Told:
    """The blocks that a router knows of, by medium, each with all tokens up to its end."""

    def __init__(self, sim) -> None:
        self.blocks, self.paths = Blocks(), {}
        self.held = {"GPU": set(), "CPU": set(), "STORAGE": set()}
        scheduler = sim.scheduler
        self._events = PageEvents(scheduler.caches, scheduler.all_tiers, tuple, self.read)

    def flush(self):
        self._events.flush()

    def read(self, rank, news):
        for event in Typed._decoder.decode(encode(Batch(1.0, self.blocks.events_of(news), rank))).events:
            if type(event).__name__ == "BlockStored":
                path, size = self.paths.get(event.parent_block_hash, ()), event.block_size
                for place, name in enumerate(event.block_hashes):
                    path = (*path, *event.token_ids[place * size : (place + 1) * size])
                    assert self.paths.setdefault(name, path) == path, "one name has one prefix in every medium"
                    self.held[event.medium].add(name)
            elif type(event).__name__ == "BlockRemoved":
                assert self.held[event.medium].issuperset(event.block_hashes)
                self.held[event.medium].difference_update(event.block_hashes)
            else:
                for held in self.held.values():
                    held.clear()


def names_on_device(cache):
    runs, found = [*cache._roots.values()], set()
    while runs:
        run = runs.pop()
        runs += run.children.values()
        if run.parent is not None:
            found |= {name_of(key) for key in cache._keys.of(run)}
    return found


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("num_below", [0, 24])
def test_a_router_knows_what_device_host_and_disk_hold(seed, num_below):
    chance = Random(seed)
    sim, _ = simulation(chance, num_slots=12, num_below=num_below, fails=0.2, num_pages=14)
    told, cache, seen = Told(sim), sim.scheduler.pages.cache, False
    for number in range(12):
        prompt = prompt_of(chance.choice([8, 16, 24]), first=chance.choice([0, 0, 5, 9]))
        sim.add(make_request(f"r{number}", prompt, max_tokens=chance.randint(1, 4), **FREE))
        settled(sim)
        if chance.random() < 0.1:
            sim.scheduler.flush_prefix_cache()
        told.flush()
        shelves = sim.scheduler.tiers._shelves
        assert told.held["GPU"] == names_on_device(cache)
        assert told.held["CPU"] == {name_of(entry.key) for entry in shelves.host[False]}
        if num_below:
            assert told.held["STORAGE"] == {name_of(entry.key) for entry in shelves.below[False]}
            seen = seen or bool(told.held["STORAGE"])
    sim.check_answers()
    assert seen == bool(num_below), "the tier below was reached"
    assert told.blocks.events_of([Gone()]) == ([AllBlocksCleared()] if any(told.held.values()) else [])


def test_what_comes_from_a_disk_that_nobody_was_told_of_is_told():
    sim, _ = simulation(Random(1), num_below=24)
    sim.add(make_request("first", prompt_of(16), max_tokens=2, **FREE))
    settled(sim)
    host = sim.scheduler.tiers._shelves.host[False]
    sim.scheduler.rows.flush_prefix_cache()
    host.clear()
    told = Told(sim)
    sim.add(make_request("again", prompt_of(16), max_tokens=2, **FREE))
    settled(sim)
    told.flush()
    assert told.held["CPU"] == {name_of(entry.key) for entry in host} != set()
    assert len(told.held["STORAGE"]) == 3, "those that were loaded"


def test_new_weights_end_what_the_disk_is_told_to_hold():
    sim, _ = simulation(Random(2), num_below=24)
    told = Told(sim)
    sim.add(make_request("first", prompt_of(16), max_tokens=2, **FREE))
    settled(sim)
    told.flush()
    assert told.held["STORAGE"]
    sim.scheduler.weights_changed()
    told.flush()
    assert not told.held["STORAGE"]
    assert told.held["CPU"]
