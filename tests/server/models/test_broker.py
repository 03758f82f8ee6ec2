"""The broker of a device over models that only count: what it gives fits, and each model that waits has its turn."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from mllm_compile.process.passage import close_all
from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.models import broker as broker_module
from mllm_compile.server.models.broker import Broker
from mllm_compile.server.models.shares import Share
from mllm_compile.server.wire.messages import Needs


class Machine:
    """A device, and what happened on it. Its clock counts from long ago: every turn is over by the broker's, which
    counts from the start of the machine."""

    def __init__(self, num_bytes: int) -> None:
        self.clock = map(float, itertools.count(-(10**9)))
        self.num_bytes = num_bytes
        self.taken: dict[str, int] = {}
        self.events: list[tuple[str, str]] = []  # waits, wakes and parks, by name
        self.taken_by_others = 0
        self.handed_over: list[int] = []  # ends of pipes, whose other ends are the memory
        self.num_taken_over = 0

    def hand_over(self) -> int:
        """A piece of memory."""
        end, memory = os.pipe()
        self.handed_over.append(end)
        return memory

    def check_handed_over(self) -> None:
        """Nobody holds a piece."""
        for end in self.handed_over:
            os.set_blocking(end, False)
            assert os.read(end, 1) == b"", "a piece is held, which no model has"
            os.close(end)
        self.handed_over.clear()


class CountingModel:
    """A model as Tenant's broker sees it."""

    def __init__(self, name: str, machine: Machine, fixed_bytes: int, is_pinned: bool = False) -> None:
        self.name, self.is_pinned, self._machine = name, is_pinned, machine
        size = machine.num_bytes
        self.needs = Needs("cuda:0", size, size, size, 0, fixed_bytes, 1, 10, 10)
        self.share: Any = None
        self.waits_since: float | None = None
        self.is_awake = self.is_alive = False
        self.has_turn_since = self.idle_since = 0.0
        self.num_requests = 0
        self.refusals: list[ApiError] = []
        self.cannot_park = False
        self.front = SimpleNamespace(refuse=self._refuse, supervisor=SimpleNamespace(refuse_start=lambda why: None))

    @property
    def is_idle(self) -> bool:
        return self.num_requests == 0

    def ask(self) -> None:
        """A request comes."""
        self.num_requests += 1
        if not self.is_awake:
            self.wanted()

    def wanted(self) -> None:
        if self.waits_since is None:
            self.waits_since = next(self._machine.clock)
            self._machine.events.append(("waits", self.name))

    async def take(self, memory: Sequence[int]) -> None:
        self._machine.num_taken_over += len(memory)
        close_all(memory)  # each once: what is closed already is an error
        self.waits_since, self.is_alive = None, True
        await asyncio.sleep(0)
        machine, size = self._machine, self.share.awake_bytes
        if sum(machine.taken.values()) + machine.taken_by_others + size > machine.num_bytes:
            raise ApiError(503, "out of memory")
        machine.taken[self.name] = size
        self.is_awake, self.has_turn_since, self.waits_since = True, next(machine.clock), None
        machine.events.append(("wakes", self.name))

    async def park(self) -> list[int]:
        await asyncio.sleep(0)
        if self.cannot_park:
            raise ApiError(503, "the host is full")
        del self._machine.taken[self.name]
        self.is_awake = False
        self._machine.events.append(("parks", self.name))
        if not self.is_idle:
            self.wanted()
        return [self._machine.hand_over()]

    def _refuse(self, error: ApiError) -> None:
        self.refusals.append(error)
        self.num_requests = 0


async def until(condition: Any, broker: Broker) -> None:
    while not condition():
        broker.changed()
        await asyncio.sleep(0.001)


def run(machine: Machine, models: list[CountingModel], work: Any, most_awake: int | None = None) -> None:
    """Runs a broker of these models, all started, while `work` runs."""

    async def both() -> None:
        broker = Broker("cuda:0", models, 0.01, most_awake)  # type: ignore[arg-type]
        broking = asyncio.ensure_future(broker.run())
        for model in models:
            model.wanted()
        await until(lambda: all(model.waits_since is None for model in models), broker)
        machine.events.clear()
        await work(broker)
        broking.cancel()
        await asyncio.gather(broking, return_exceptions=True)
        machine.check_handed_over()

    asyncio.run(both())


def test_the_longest_idle_model_gives_way_and_a_pinned_one_never():
    machine = Machine(100)
    a, b, c, p = models = [CountingModel(name, machine, 20, name == "p") for name in "abcp"]

    async def work(broker: Broker) -> None:
        for last, model in enumerate((b, c, a)):
            model.ask()
            await until(lambda model=model: model.is_awake, broker)
            model.num_requests, model.idle_since = 0, float(last + 1)
        b.idle_since = 9.0
        asleep = next(model for model in models if not model.is_awake)
        first = min((model for model in (a, b, c) if model.is_awake), key=lambda one: one.idle_since)
        machine.events.clear()
        before = machine.num_taken_over
        asleep.ask()
        await until(lambda: asleep.is_awake, broker)
        assert machine.events == [("waits", asleep.name), ("parks", first.name), ("wakes", asleep.name)]
        assert p.is_awake and machine.num_taken_over == before + 1

    run(machine, models, work)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_awake_fits_and_all_that_wait_have_their_turn_in_order(seed):
    chance = random.Random(seed)
    machine = Machine(100)
    models = [CountingModel(name, machine, chance.randint(5, 60)) for name in "abcdef"]

    async def work(broker: Broker) -> None:
        for _ in range(200):
            chance.choice(models).ask()
            broker.changed()
            if chance.random() < 0.4:
                done = chance.choice(models)
                done.num_requests = 0 if done.is_awake else done.num_requests
            await asyncio.sleep(chance.choice((0, 0, 0.002)))
            assert sum(machine.taken.values()) <= machine.num_bytes
        for model in models:
            await until(lambda model=model: model.is_awake or not model.num_requests, broker)
            model.num_requests = 0

    run(machine, models, work)
    waits = [(place, name) for place, (what, name) in enumerate(machine.events) if what == "waits"]
    assert waits
    for place, name in waits:
        turn = machine.events.index(("wakes", name), place) if ("wakes", name) in machine.events[place:] else None
        assert turn is not None, f"{name} never had its turn"
        woken = [other for what, other in machine.events[place:turn] if what == "wakes"]
        assert len(woken) == len(set(woken)), "no model is woken twice before one that waits"


def test_requests_of_a_model_are_told_that_others_have_the_memory_and_it_is_tried_again():
    machine = Machine(100)
    a, b = models = [CountingModel(name, machine, 50) for name in "ab"]

    async def work(broker: Broker) -> None:
        asleep, awake = (a, b) if b.is_awake else (b, a)
        machine.taken_by_others = 90
        asleep.ask()
        await until(lambda: asleep.refusals, broker)
        (refusal,) = asleep.refusals
        assert refusal.status == 503
        assert f"{asleep.name} needs 60 B of cuda:0, which others hold: out of memory" in refusal.message
        assert not awake.is_awake, "it has given way first"
        machine.taken_by_others = 0
        asleep.ask()
        await until(lambda: asleep.is_awake, broker)

    run(machine, models, work)


def test_a_model_that_cannot_be_woken_holds_up_no_other(monkeypatch):
    monkeypatch.setattr(broker_module, "_AGAIN_S", 0.01)
    machine = Machine(100)
    a, b, c = models = [CountingModel(name, machine, fixed) for name, fixed in (("a", 50), ("b", 50), ("c", 5))]

    async def work(broker: Broker) -> None:
        machine.taken_by_others = 80
        for model in models:
            model.num_requests = 0
        waiting = a if not a.is_awake else b
        waiting.front.refuse = waiting.refusals.append  # it stays busy, as with a load of an adapter
        waiting.ask()
        await until(lambda: waiting.refusals, broker)
        c.ask()
        await until(lambda: c.is_awake or len(waiting.refusals) > 20, broker)
        assert c.is_awake

    run(machine, models, work)


def test_a_model_that_cannot_be_parked_stays():
    machine = Machine(100)
    a, b = models = [CountingModel(name, machine, 50) for name in "ab"]

    async def work(broker: Broker) -> None:
        asleep, awake = (a, b) if b.is_awake else (b, a)
        awake.cannot_park = True
        asleep.ask()
        await until(lambda: asleep.refusals, broker)
        assert awake.is_awake and awake.is_pinned

    run(machine, models, work)


def test_engines_that_take_a_little_more_than_was_planned_stay_beside_each_other():
    machine = Machine(1000)
    a, b = models = [CountingModel(name, machine, 480) for name in "ab"]

    async def work(broker: Broker) -> None:
        for model in models:
            model.share = Share(10, held_bytes=15, awake_bytes=490)
        machine.taken.pop("a")
        a.is_awake = False  # as after a crash
        a.ask()
        await until(lambda: a.is_awake, broker)
        assert b.is_awake

    run(machine, models, work)


def test_no_more_run_at_once_than_may():
    machine = Machine(1000)
    models = [CountingModel(name, machine, 10) for name in "abc"]

    async def work(broker: Broker) -> None:
        for model in models * 2:
            model.ask()
            await until(lambda model=model: model.is_awake, broker)
            model.num_requests = 0
            assert len(machine.taken) <= 2

    run(machine, models, work, most_awake=2)
    assert isinstance(models[0].share, Share)
