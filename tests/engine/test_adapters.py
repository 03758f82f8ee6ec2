"""Adapters of an engine: which one answers a request, and what happens while they are loaded, replaced and unloaded."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mllm_compile import Engine, RequestError, SamplingParams
from mllm_compile.engine.core.adapter_queue import AdapterParts
from mllm_compile.engine.start.adapters import PoolWriter
from mllm_compile.engine.start.assemble import _live_weights
from mllm_compile.errors import AdapterNotFoundError, CheckpointError, EngineDeadError, MllmError
from mllm_compile.runtime.lora.pool import LoraPool
from mllm_compile.runtime.lora.target import LoraBuffers, LoraLayout, LoraTarget, a_name
from tests.adapters.fake_device import BASE, AdapterRunner, FakeDevice, adapter_folder, changed_token
from tests.engine.cases import until
from tests.fakes import ENDLESS, ROOM_FOR_ENDLESS, expected_tokens, fake_engine
from tests.hang_guard import HANG_S

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=ENDLESS, ignore_eos=True)
PROMPT = list(range(40, 60))


def answer_of(number: int, count: int = 4) -> list[int]:
    return expected_tokens(PROMPT, count, lambda token_ids: changed_token(token_ids, number))


@pytest.fixture
def device() -> FakeDevice:
    device = FakeDevice()
    device.reading.set()
    return device


@pytest.fixture
def runner(device: FakeDevice) -> AdapterRunner:
    runner = AdapterRunner()
    runner.device = device
    return runner


@pytest.fixture
def engine(runner: AdapterRunner, device: FakeDevice, tmp_path: Path) -> Iterator[Engine]:
    parts = AdapterParts(BASE, device)
    with fake_engine(runner, adapters=parts, **ROOM_FOR_ENDLESS) as engine:
        for name, number in (("three", 3), ("one", 1), ("two", 2)):  # the first one gives its place up
            engine.load_adapter(name, adapter_folder(tmp_path / name, number))
        yield engine
        device.reading.set()
        runner.gate.set()


def tokens(engine: Engine, adapter: Any, prompts: Any = PROMPT) -> Any:
    return engine.generate(prompts, PARAMS, adapter=adapter)[0].token_ids


def test_an_adapter_that_is_not_there_is_said_before_the_model_is_looked_for():
    config = {"model": {"path": "./no_model"}, "lora": {"max_adapters": 1, "adapters": {"sql": "./no_adapter"}}}
    with pytest.raises(AdapterNotFoundError, match=r"no_adapter has no adapter_config\.json"):
        Engine(config)
    with pytest.raises(MllmError, match="no_model"):  # whoever loads them later is told of the model
        Engine(config, load_adapters=False)


def test_each_prompt_of_a_call_has_its_own_adapter(engine):
    answers = engine.generate([PROMPT] * 4, PARAMS, adapter=["one", None, "two", "one"])
    assert [answer.token_ids for answer in answers] == [answer_of(number) for number in (1, 0, 2, 1)]
    named = [answer.adapter and (answer.adapter.name, answer.adapter.version) for answer in answers]
    assert named == [("one", 1), None, ("two", 1), ("one", 1)]


def test_more_adapters_than_places_answer_one_after_the_other(engine, device):
    names = ["one", "two", "three", "three", "two", "one", "three"]
    answers = engine.generate([PROMPT] * 7, PARAMS, adapter=names)
    assert [answer.token_ids for answer in answers] == [answer_of(number) for number in (1, 2, 3, 3, 2, 1, 3)]
    assert len(device.content) == 2


def test_chats_and_streams_name_an_adapter_too(engine):
    def streamed(adapter: str | None) -> list[int]:
        return [token for output in engine.stream(PROMPT, PARAMS, adapter=adapter) for token in output.token_ids]

    assert (streamed("two"), streamed(None)) == (answer_of(2), answer_of(0))
    messages = [{"role": "user", "content": "hello"}]
    of_two = engine.chat(messages, PARAMS, adapter="two")[0].token_ids
    assert of_two != engine.chat(messages, PARAMS)[0].token_ids
    assert of_two == [
        token for output in engine.stream_chat(messages, PARAMS, adapter="two") for token in output.token_ids
    ]


def test_the_completions_of_a_prompt_have_one_adapter(engine):
    params = SamplingParams(max_tokens=4, ignore_eos=True, n=3)
    outputs = engine.generate(PROMPT, params, adapter="two")[0].outputs
    assert [output.token_ids for output in outputs] == [answer_of(2)] * 3


def test_a_request_waits_for_its_adapter_while_others_are_answered(engine, device):
    device.reading.clear()
    waiting = engine.stream(PROMPT, PARAMS, adapter="three")
    assert tokens(engine, "two") == answer_of(2)
    stats = engine.stats()
    assert (stats.waiting, stats.adapters.waiting, stats.adapters.running) == (1, ("three",), ())
    device.reading.set()
    assert [token for output in waiting for token in output.token_ids] == answer_of(3)
    assert engine.stats().adapters.waiting_requests == 0


def test_a_request_that_waits_for_its_adapter_can_be_aborted(engine, device):
    device.reading.clear()
    waiting = engine.stream(PROMPT, PARAMS, request_id="gone", adapter="three")
    engine.abort("gone")
    assert [output.finish_reason for output in waiting] == ["abort"]
    assert engine.stats().waiting == 0
    device.reading.set()
    assert tokens(engine, "three") == answer_of(3)


def test_an_adapter_is_unloaded_while_its_requests_run(engine, runner):
    running = engine.stream(PROMPT, LONG, adapter="one")
    first = next(running)
    engine.unload_adapter("one")
    assert [adapter.name for adapter in engine.list_adapters()] == ["three", "two"]
    with pytest.raises(RequestError, match="there is no adapter 'one'; loaded are three, two"):
        engine.generate(PROMPT, PARAMS, adapter="one")
    more = [*first.token_ids, *next(running).token_ids, *next(running).token_ids]
    assert more == answer_of(1, len(more))
    running.close()
    with pytest.raises(RequestError, match="there is no adapter 'one'"):
        engine.unload_adapter("one")


def test_a_replaced_adapter_answers_new_requests_and_the_old_version_those_that_run(engine, tmp_path):
    running = engine.stream(PROMPT, LONG, adapter="one")
    taken = list(next(running).token_ids)
    folder = adapter_folder(tmp_path / "newer", 7)
    with pytest.raises(RequestError, match=r"adapter 'one' has already been loaded, as version 1. Load it in place"):
        engine.load_adapter("one", folder)
    assert engine.load_adapter("one", folder, replace=True).version == 2
    answer = engine.generate(PROMPT, PARAMS, adapter="one")[0]
    assert (answer.token_ids, answer.adapter.version) == (answer_of(7), 2)
    taken += next(running).token_ids
    assert taken == answer_of(1, len(taken))
    running.close()
    assert engine.load_adapter("one", folder, replace=True).version == 2, "the same files are the same version"


def test_a_name_that_is_loaded_again_has_a_version_of_its_own(engine, tmp_path):
    versions = []
    for number in (7, 8):
        engine.unload_adapter("one")
        versions.append(engine.load_adapter("one", adapter_folder(tmp_path / "newer", number)).version)
        assert tokens(engine, "one") == answer_of(number)
    assert versions == [2, 3]


def test_later_completions_of_a_prompt_have_the_version_of_the_first_one(runner, device, tmp_path):
    """One runs at a time: between two of them nothing else holds the adapter, and its folder is gone."""
    folder = adapter_folder(tmp_path / "one", 1)
    with fake_engine(runner, adapters=AdapterParts(BASE, device), max_running_requests=1) as engine:
        engine.load_adapter("one", folder)
        runner.gate.clear()
        running = engine.stream(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True, n=3), adapter="one")
        engine.unload_adapter("one")
        shutil.rmtree(folder)
        runner.gate.set()
        taken: dict[int, list[int]] = {}
        for output in running:
            for one in output.outputs:
                taken.setdefault(one.index, []).extend(one.token_ids)
    assert taken == dict.fromkeys(range(3), answer_of(1))


def test_a_version_that_was_replaced_while_its_request_waited_is_not_another_one(engine, device, tmp_path):
    """Its folder holds the newer one: the request fails, and is not answered by another version."""
    device.reading.clear()
    waiting = engine.stream(PROMPT, PARAMS, adapter="three")
    adapter_folder(tmp_path / "three", 8)
    device.reading.set()
    engine.load_adapter("three", tmp_path / "three", replace=True)
    try:
        assert [token for output in waiting for token in output.token_ids] == answer_of(3)
    except CheckpointError as error:  # it was read again
        assert "adapter 'three' could not be loaded: " in str(error)  # perhaps while it was written
    assert tokens(engine, "three") == answer_of(8)


def test_a_folder_that_is_gone_ends_the_requests_that_wait_for_it_alone(engine, tmp_path):
    (tmp_path / "three" / "adapter_model.safetensors").unlink()
    answers = engine.generate([PROMPT, PROMPT], PARAMS, adapter=["three", "one"])
    assert "adapter 'three' could not be loaded: " in (answers[0].error or "")
    assert answers[1].token_ids == answer_of(1)
    adapter_folder(tmp_path / "three", 3)
    assert tokens(engine, "three") == answer_of(3)


def test_a_load_that_breaks_off_leaves_nothing_behind(engine, device, tmp_path):
    for name in ("one", "two"):
        engine.unload_adapter(name)
    device.fails = 1
    with pytest.raises(RuntimeError, match="the device is full"):
        engine.load_adapter("four", adapter_folder(tmp_path / "four", 4))
    assert [adapter.name for adapter in engine.list_adapters()] == ["three"]
    with pytest.raises(RequestError, match="there is no adapter 'four'"):
        engine.generate(PROMPT, PARAMS, adapter="four")
    device.fails = 1
    with pytest.raises(MllmError, match="adapter 'three' could not be loaded: the device is full"):
        engine.generate(PROMPT, PARAMS, adapter="three")
    assert tokens(engine, "three") == answer_of(3)
    assert engine.load_adapter("four", tmp_path / "four").version == 1
    assert tokens(engine, "four") == answer_of(4)


def test_two_loads_of_one_name_at_once(engine, tmp_path, monkeypatch):
    """The second one is refused, and so is an unload; the first one is not hurt."""
    from mllm_compile.adapters import registry

    whole, begun, go_on = registry.read_adapter, threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(HANG_S)
        return whole(*args)

    monkeypatch.setattr(registry, "read_adapter", slow)
    folder = adapter_folder(tmp_path / "four", 4)
    first = threading.Thread(target=engine.load_adapter, args=("four", folder))
    first.start()
    assert begun.wait(HANG_S)
    with pytest.raises(RequestError, match="adapter 'four' is being loaded; load it again when that is over"):
        engine.load_adapter("four", folder, replace=True)
    with pytest.raises(RequestError, match="adapter 'four' is being loaded; unload it when that is over"):
        engine.unload_adapter("four")
    with pytest.raises(RequestError, match="there is no adapter 'four'"):
        engine.generate(PROMPT, PARAMS, adapter="four")
    go_on.set()
    first.join()
    assert tokens(engine, "four") == answer_of(4)


def test_the_prefix_cache_never_crosses_adapters(engine, tmp_path):
    def cached(adapter: str | None, salt: str | None = None) -> int | None:
        prompt = {"prompt_token_ids": PROMPT} | ({} if salt is None else {"cache_salt": salt})
        answer = engine.generate(prompt, PARAMS, adapter=adapter)[0]
        assert answer.token_ids == answer_of(0 if adapter is None else {"one": 1, "two": 2, "uno": 1}[adapter])
        return answer.num_cached_tokens

    assert [cached(None), cached("one"), cached("two")] == [0, 0, 0]
    assert [cached("one", "mine"), cached(None, "mine")] == [0, 0]
    assert min(cached(None) or 0, cached("one") or 0, cached("two") or 0, cached("one", "mine") or 0) > 0
    engine.load_adapter("uno", tmp_path / "one")
    assert cached("uno"), "the same files are the same adapter"
    adapter_folder(tmp_path / "one", 9)
    engine.load_adapter("one", tmp_path / "one", replace=True)
    answer = engine.generate(PROMPT, PARAMS, adapter="one")[0]
    assert (answer.token_ids, answer.num_cached_tokens) == (answer_of(9), 0)


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ("four", "there is no adapter 'four'; loaded are three, one, two"),
        (["one"], None),
        (["one", "two"], "adapter: expected one, or one for each of the 1 prompts, got 2"),
        (5, "adapter: expected a name or a list of names, got int 5"),
        ([5], "adapter: expected a name or a list of names, got list [5]"),
    ],
)
def test_a_name_is_checked(engine, adapter, said):
    if said is None:
        assert engine.generate([PROMPT], PARAMS, adapter=adapter)[0].token_ids == answer_of(1)
        return
    with pytest.raises(RequestError, match=said.replace("[", r"\[")):
        engine.generate(PROMPT, PARAMS, adapter=adapter)


@pytest.mark.parametrize("name", ["", " a", "a\nb", "x" * 201, None])
def test_a_malformed_name_is_refused(engine, tmp_path, name):
    with pytest.raises(RequestError, match="expected an adapter's name of up to 200 letters"):
        engine.load_adapter(name, tmp_path / "one")


def test_an_engine_without_places_for_adapters_says_so():
    with fake_engine() as engine:
        with pytest.raises(RequestError, match=r"no adapters are served. Set lora.max_adapters in the config"):
            engine.load_adapter("one", "/nowhere")
        with pytest.raises(RequestError, match=r"adapter: none are served. Set lora.max_adapters in the config"):
            engine.generate(PROMPT, PARAMS, adapter="one")
        assert engine.list_adapters() == []
        assert engine.stats().adapters is None


def test_an_engine_with_adapters_ends_when_nobody_holds_it(device):
    other = fake_engine(AdapterRunner(), adapters=AdapterParts(BASE, device))
    core, gone = other.core, weakref.ref(other)
    gc.disable()
    try:
        del other
        assert gone() is None
    finally:
        gc.enable()
    assert core.end_error is not None


def test_the_device_s_memory_for_adapters_is_the_runner_s():
    target = LoraTarget("q_proj.weight", 2, 3, "q_proj", 0, 0, 2)
    pool = LoraPool(LoraLayout(3, 4, "float32", (target,), (LoraBuffers("q_proj", 4, 3, 2),)), torch.device("cpu"))
    writer, gone = PoolWriter(pool, torch.device("cpu")), weakref.ref(pool)
    matrices = {"q_proj.weight": (torch.ones(1, 3), torch.ones(2, 1))}
    writer.write(1, writer.prepared(matrices), writer.moment())
    assert pool.buffers[a_name("q_proj")][1, 0].tolist() == [1, 1, 1]
    del pool
    assert (gone(), writer.num_slots) == (None, 3)
    with pytest.raises(EngineDeadError, match="the engine is closed"):
        writer.write(1, matrices, writer.moment())


def test_requests_that_wait_hear_of_the_engine_s_end(engine, device, tmp_path):
    folder = adapter_folder(tmp_path / "five", 5)
    device.reading.clear()
    waiting = engine.stream(PROMPT, PARAMS, adapter="three")
    until(lambda: engine.stats().waiting == 1)
    closing = threading.Thread(target=engine.close)
    closing.start()
    assert [output.finish_reason for output in waiting][-1:] == ["abort"]
    device.reading.set()
    closing.join()
    with pytest.raises(MllmError, match="the engine is closed"):
        engine.load_adapter("five", folder)


def test_weights_whose_norms_adapters_have_are_not_updated():
    pool = SimpleNamespace(scaled=frozenset({"q_proj.weight"}))
    model = SimpleNamespace(live=object(), images=None, sources=None, lora=SimpleNamespace(pool=pool))
    runner: Any = SimpleNamespace(model=model, pipeline=None)
    assert str(_live_weights(runner, None)).startswith("lora.dora is set")
    pool.scaled = frozenset()
    assert _live_weights(runner, None) is runner.model.live
