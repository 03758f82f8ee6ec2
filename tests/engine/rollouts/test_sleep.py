"""An engine asleep runs nothing and reads nothing; awake it goes on as before, with its weights or with new ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from mllm_compile import Engine
from mllm_compile.engine.async_engine import AsyncEngine
from mllm_compile.errors import (
    DeviceMemoryError,
    EnginePausedError,
    RequestError,
    UpdateConflictError,
    WeightsTornError,
    WeightUpdateError,
)
from mllm_compile.runtime.device import memory
from mllm_compile.runtime.device.sleep import SleepingMemory
from mllm_compile.runtime.updates.live import LiveWeights
from tests.engine.rollouts.test_pauses import LONG, PROMPT, SHORT, WITHOUT_END, beside, rest, started
from tests.engine.rollouts.test_weight_histories import History, check
from tests.engine.rollouts.test_weight_updates import following, live_weights, tensors_of, with_key
from tests.fakes import ROOM_FOR_ENDLESS, FakeStepRunner, all_pages_are_back, expected_tokens, fake_engine
from tests.hang_guard import HANG_S, until
from tests.sleeping_arena import Machine

CPU = torch.device("cpu")


@dataclass
class Asleep:
    """An engine over fakes, whose weights are lost where they should be; `kv` stands for its cache."""

    engine: Engine
    live: LiveWeights
    machine: Machine
    kv: torch.Tensor
    weights_bytes: int
    kv_bytes: int

    def tokens(self, key: int = 0) -> None:
        """Checks that it answers as a model with this key."""
        assert self.engine.generate(PROMPT, SHORT)[0].token_ids == expected_tokens(PROMPT, 8, with_key(key))


def made(**changes: Any) -> Asleep:
    machine, live = Machine(), live_weights()
    weights, kept, kv = machine.arena(), machine.arena(), machine.arena()
    tensors = weights.zeros([(spec.shape, spec.dtype) for spec in live.specs])
    live = replace(live, tensors={spec.name: tensor for spec, tensor in zip(live.specs, tensors, strict=True)})
    (drafter,) = kept.zeros([((64,), torch.bfloat16)])
    drafter += 3
    (cache,) = kv.zeros([((300,), torch.float32)])
    memory = SleepingMemory(CPU, weights, [kept], [kv])
    engine = fake_engine(FakeStepRunner(following(live)), live=live, memory=memory, **changes)
    return Asleep(engine, live, machine, cache, weights.num_bytes + kept.num_bytes, kv.num_bytes)


@pytest.fixture
def made_engine() -> Iterator[Asleep]:
    one = made()
    with one.engine:
        yield one


def test_memory_comes_back_at_its_addresses_with_what_it_held(made_engine):
    engine, machine = made_engine.engine, made_engine.machine
    engine.update_weights(tensors_of(7).items())
    made_engine.tokens(7)
    places = {name: tensor.data_ptr() for name, tensor in made_engine.live.tensors.items()}
    made_engine.kv += 5
    whole = machine.taken
    for _ in range(3):
        engine.sleep()
        assert (machine.taken, engine.state, engine.is_sleeping, engine.is_paused) == (0, "sleeping", True, True)
        engine.wake_up()
        assert (machine.taken, engine.state, engine.is_sleeping) == (whole, "running", False)
        assert not made_engine.kv.any(), "masked NaN would poison sums"
        made_engine.tokens(7)
    assert {name: tensor.data_ptr() for name, tensor in made_engine.live.tensors.items()} == places
    assert engine.stats().prefix_hit_tokens == 0, "the prefix cache goes with its pages"


def test_what_the_host_has_is_not_copied_again(made_engine):
    engine, machine = made_engine.engine, made_engine.machine
    for _ in range(3):
        engine.sleep()
        engine.wake_up()
    assert machine.num_saves == 2, "weights, and those that no update brings"
    engine.update_weights(tensors_of(7).items())
    engine.sleep()
    assert machine.num_saves == 3
    engine.wake_up()
    made_engine.tokens(7)


def test_sleeping_and_waking_may_be_repeated(made_engine):
    engine, machine = made_engine.engine, made_engine.machine
    engine.wake_up()
    for level in (0, 1, 1, 0, 1):
        engine.sleep(level)
    assert machine.taken == 0
    engine.wake_up()
    engine.wake_up()
    assert machine.num_maps == 6
    made_engine.tokens()
    engine.sleep(1)
    engine.sleep(2)
    engine.sleep(1)
    engine.wake_up()
    assert engine.state == "torn"


def test_level_0_keeps_all_memory_and_runs_nothing(made_engine):
    engine, whole = made_engine.engine, made_engine.machine.taken
    stream, tokens = started(engine, LONG)
    engine.sleep(0, mode="keep")
    steps = engine.stats().steps
    assert made_engine.machine.taken == whole and engine.state == "sleeping"
    engine.wake_up(["weights", "kv_cache"])
    assert engine.is_sleeping, "which are not asleep"
    assert engine.stats().steps == steps
    engine.wake_up(["scheduling"])
    assert rest(stream, tokens) == expected_tokens(PROMPT, 200, with_key(0))
    assert engine.stats().preemptions == 0


def test_dropped_weights_are_torn_until_an_update_is_whole(made_engine):
    engine, machine = made_engine.engine, made_engine.machine
    engine.sleep(2)
    assert machine.taken == 0
    engine.wake_up(["weights"])
    assert (machine.taken, engine.state) == (made_engine.weights_bytes, "sleeping")
    newcomer = beside(engine.generate, PROMPT, SHORT)
    engine.update_weights(tensors_of(7).items())
    until(lambda: engine.stats().waiting == 1, "it waits for the KV cache")
    engine.wake_up(["kv_cache"])
    assert newcomer.result(HANG_S)[0].token_ids == expected_tokens(PROMPT, 8, with_key(7))
    engine.sleep(2)
    engine.wake_up()
    assert engine.state == "torn"
    with pytest.raises(WeightsTornError, match=r"torn: sleep of level 2 dropped them\. Nothing is generated"):
        engine.generate(PROMPT, SHORT)
    with pytest.raises(WeightsTornError):
        engine.weights.start(partial=True)
    engine.sleep(1)  # what they hold is nobody's
    engine.wake_up()
    assert engine.state == "torn"
    engine.update_weights(tensors_of(9).items(), direct=True)
    made_engine.tokens(9)


@pytest.mark.parametrize("tags", [["weights"], ["kv_cache"]])
def test_one_tag_may_sleep_alone(made_engine, tags):
    engine, machine = made_engine.engine, made_engine.machine
    whole = machine.taken
    gone = made_engine.weights_bytes if tags == ["weights"] else made_engine.kv_bytes
    engine.sleep(1, tags=tags)
    assert machine.taken == whole - gone
    engine.wake_up(tags)
    assert engine.state == "running"
    made_engine.tokens()


@pytest.mark.parametrize("mode", ["keep", "retract"])
def test_kept_requests_are_computed_anew_and_newcomers_wait(made_engine, mode):
    engine = made_engine.engine
    stream, tokens = started(engine, LONG)
    engine.sleep(1, mode)
    newcomer = beside(engine.generate, PROMPT, SHORT)
    until(lambda: engine.stats().waiting == 2, "it is queued")
    engine.wake_up()
    assert rest(stream, tokens) == expected_tokens(PROMPT, 200, with_key(0))
    assert newcomer.result(HANG_S)[0].token_ids == expected_tokens(PROMPT, 8, with_key(0))
    assert engine.stats().preemptions > 0 and all_pages_are_back(engine)


def test_requests_are_aborted_or_waited_for():
    with made(**ROOM_FOR_ENDLESS).engine as engine:
        stream, _ = started(engine, WITHOUT_END)
        engine.sleep(1)
        assert list(stream)[-1].finish_reason == "abort"
        engine.wake_up()
        stream, tokens = started(engine, LONG)
        sleeping = beside(engine.sleep, 1, "wait")
        assert rest(stream, tokens) == expected_tokens(PROMPT, 200, with_key(0))
        sleeping.result(HANG_S)
        assert engine.state == "sleeping"
        engine.sleep(1, "wait")  # with a request that cannot end
        engine.wake_up()
        assert engine.state == "running"
        stream, _ = started(engine, WITHOUT_END)
        sleeping = beside(engine.sleep, 1, "wait")
        until(lambda: engine.state == "pausing")
        engine.pause("abort")
        sleeping.result(HANG_S)
        assert list(stream)[-1].finish_reason == "abort"
        engine.wake_up()
        assert engine.state == "paused", "which nobody has resumed"


def test_a_wait_that_torn_weights_end_leaves_no_pause():
    one = made(**ROOM_FOR_ENDLESS)
    with one.engine as engine:
        stream, _ = started(engine, WITHOUT_END)
        sleeping = beside(engine.sleep, 1, "wait")
        until(lambda: engine.state == "pausing")
        engine.weights.start(direct=True)
        engine.weights.receive(list(tensors_of(7).items())[:1])
        engine.weights.abandon("the test")
        with pytest.raises(WeightsTornError):
            sleeping.result(HANG_S)
        engine.update_weights(tensors_of(7).items())
        assert engine.state == "running"
        stream.close()


def test_a_pause_outlives_sleep(made_engine):
    engine = made_engine.engine
    engine.pause("keep")
    engine.sleep(1, "wait")
    engine.wake_up()
    assert engine.state == "paused"
    engine.sleep(1)
    engine.resume()
    assert engine.state == "sleeping"
    engine.wake_up()
    made_engine.tokens()


def test_requests_may_be_refused_while_asleep(made_engine):
    engine = made_engine.engine
    engine.sleep(1, "keep", refuses=True)
    with pytest.raises(EnginePausedError, match=r"asleep \(kv_cache, weights\) and takes no requests. Send it again"):
        engine.generate(PROMPT, SHORT)
    engine.wake_up(["kv_cache"])
    with pytest.raises(EnginePausedError, match=r"asleep \(weights\)"):
        engine.generate(PROMPT, SHORT)
    engine.wake_up()
    made_engine.tokens()


def test_an_update_needs_weights_that_are_awake_and_sleep_needs_them_at_rest(made_engine):
    engine = made_engine.engine
    engine.sleep(1)
    for call in (engine.weights.start, engine.weights.sums):
        with pytest.raises(UpdateConflictError, match=r"weights are asleep. Call wake_up\(tags=\['weights'\]\) first"):
            call()
    engine.wake_up(["weights"])
    engine.update_weights(tensors_of(7).items())
    assert engine.weights.sums()
    engine.wake_up()
    made_engine.tokens(7)
    for direct in (False, True):
        engine.weights.start(direct=direct)
        with pytest.raises(UpdateConflictError, match="an update of the weights is open"):
            engine.sleep(1)
        engine.weights.abandon("the test")
    made_engine.tokens(7)


def test_what_does_not_fit_sleeps_on(made_engine):
    engine, machine = made_engine.engine, made_engine.machine
    engine.sleep(1)
    size, machine.size = machine.size, made_engine.weights_bytes
    with pytest.raises(DeviceMemoryError, match="the machine of a test is full"):
        engine.wake_up()
    assert machine.taken == made_engine.weights_bytes and engine.core.gate.sleeping == {"kv_cache"}
    engine.sleep(1)
    machine.size = made_engine.weights_bytes - 1
    with pytest.raises(DeviceMemoryError):
        engine.wake_up()
    assert machine.taken == 0 and engine.core.gate.sleeping == {"kv_cache", "weights"}
    machine.size = size
    engine.wake_up()
    made_engine.tokens()


@pytest.mark.parametrize("first", [None, 0])
def test_a_host_that_is_full_leaves_all_awake(made_engine, first):
    engine, machine = made_engine.engine, made_engine.machine
    if first is not None:
        engine.sleep(first, "keep")
    state, taken, machine.is_host_full = engine.state, machine.taken, True
    with pytest.raises(DeviceMemoryError, match="the host of a test is full"):
        engine.sleep(1, refuses=first is None)
    assert (engine.state, machine.taken) == (state, taken)
    machine.is_host_full = False
    engine.wake_up()
    made_engine.tokens()


def test_copies_that_the_host_has_no_room_for_are_refused_ahead(made_engine, monkeypatch):
    engine, needed = made_engine.engine, made_engine.weights_bytes
    monkeypatch.setattr(memory, "_host_memory_bytes", lambda: (needed - 1, 1 << 30))
    with pytest.raises(DeviceMemoryError, match=r"a copy of sleeping weights needs .* or use level 2"):
        engine.sleep(1)
    assert engine.state == "running" and engine.stats().sleep_host_bytes == 0
    monkeypatch.setattr(memory, "_host_memory_bytes", lambda: (needed, 1 << 30))
    engine.sleep(1)
    monkeypatch.setattr(memory, "_host_memory_bytes", lambda: (0, 1 << 30))
    for _ in range(2):  # the memory is there
        assert engine.stats().sleep_host_bytes == needed
        engine.wake_up()
        made_engine.tokens()
        engine.sleep(1)


def test_arguments_that_cannot_be_are_refused(made_engine):
    engine = made_engine.engine
    for arguments, message in (
        ({"level": 3}, "level: expected 0, 1 or 2, got 3"),
        ({"mode": "stop"}, "mode: expected one of abort, wait, keep, retract, got 'stop'"),
        ({"tags": ["kv"]}, "tags: expected a list of weights, kv_cache, scheduling, got 'kv'"),
        ({"tags": "weights"}, "tags: expected a list of .*, got 'weights'"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.sleep(**arguments)
    for tags in (["cuda_graph"], []):
        with pytest.raises(RequestError, match="tags: expected a list of"):
            engine.wake_up(tags)
    assert engine.state == "running"
    with fake_engine(memory="runtime.enable_sleep_mode is not set") as other:
        with pytest.raises(RequestError, match="enable_sleep_mode is not set"):
            other.sleep(1)
        other.sleep(0)
        other.wake_up()
        assert other.state == "running"
    with fake_engine(live="they cannot be updated", memory=SleepingMemory(CPU, None, [], [])) as other:
        with pytest.raises(WeightUpdateError, match="they cannot be updated"):
            other.sleep(2)
        other.sleep(1)


def test_an_engine_asleep_can_be_closed():
    one = made()
    waiting = []
    with one.engine as engine:
        stream, _ = started(engine, LONG)
        engine.sleep(1, "keep")
        waiting.append(stream)
    assert list(waiting[0])[-1].finish_reason == "abort"


def test_tasks_of_an_event_loop_sleep_and_wake():
    one = made()

    async def run() -> list[int]:
        async with AsyncEngine(one.engine) as engine:
            await engine.sleep(1, tags=["weights", "kv_cache"])
            assert await engine.is_sleeping() and one.machine.taken == 0
            answer = asyncio.ensure_future(anext(engine.generate(PROMPT, SHORT, stream=False)))
            await engine.wake_up(["weights"])
            await engine.wake_up()
            assert not await engine.is_sleeping()
            return (await answer).token_ids

    assert asyncio.run(run()) == expected_tokens(PROMPT, 8, with_key(0))


# --- random histories -------------------------------------------------------------------------------------------------


class SleepyHistory(History):
    """Sleeps and wakes too."""

    def __init__(self, one: Asleep, seed: int) -> None:
        super().__init__(one.engine, seed)
        self._one, self._sleepy = one, random.Random(seed + 1)

    def events(self) -> tuple[Any, ...]:
        return (*super().events(), self._sleep, self._wake, self._wake)

    def end(self) -> None:
        self._engine.wake_up()
        if self._engine.state == "torn":
            self._update()
        super().end()
        assert self._one.machine.taken == self._one.weights_bytes + self._one.kv_bytes

    def _sleep(self) -> None:
        modes = ("abort", "keep", "retract")
        tags = self._sleepy.choice((None, None, ["weights"], ["kv_cache"]))
        self._engine.sleep(self._sleepy.randrange(3), self._sleepy.choice(modes), tags)

    def _wake(self) -> None:
        self._engine.wake_up(self._sleepy.choice((None, None, ["weights"], ["kv_cache"], ["scheduling"])))
        if self._engine.state == "torn":
            self._update()

    def _resume(self) -> None:
        if self._engine.weights.is_torn:
            with pytest.raises(WeightsTornError):
                super()._resume()
        else:
            super()._resume()

    def _update(self) -> None:
        self._unless_asleep(super()._update)

    def _break_off(self) -> None:
        self._unless_asleep(super()._break_off)

    def _unless_asleep(self, function: Any) -> None:
        if "weights" not in self._engine.core.gate.sleeping:
            function()
        else:
            with pytest.raises(UpdateConflictError, match="asleep"):
                self._engine.update_weights(tensors_of(1).items())


@pytest.mark.parametrize("seed", range(12))
def test_random_orders_of_sleep_wake_update_and_requests(seed):
    one = made(num_pages=65)
    with one.engine as engine:
        history = SleepyHistory(one, seed)
        history.run()
        for prompt, stream, outputs in history.streams:
            outputs += stream
            check(prompt, outputs, history.key_of)
        assert all_pages_are_back(engine)
