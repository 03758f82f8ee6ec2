"""Ctrl-C in a program that holds an engine: the call ends, what it asked for is aborted, the engine can be used on."""

import asyncio
import os
import signal
import threading
from contextlib import suppress

import pytest

from mllm_compile.engine.async_engine import AsyncEngine
from mllm_compile.engine.core.loop import EngineCore
from mllm_compile.engine.engine import Engine
from mllm_compile.engine.start import assemble
from mllm_compile.runtime.model_runner import ModelRunner
from tests.engine.cases import params, start, until
from tests.fakes import ENDLESS, FakeStepRunner, all_pages_are_back, expected_tokens, fake_engine
from tests.tiny_model import tiny_config


@pytest.fixture(autouse=True)
def python_handles_ctrl_c():
    """A shell's background jobs ignore it, and so would the test that is one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c_when(condition):
    def wait_and_press():
        until(condition)
        os.kill(os.getpid(), signal.SIGINT)

    return start(wait_and_press)[0]


def has_ended(engine, count=1):
    until(lambda: engine.stats().running == engine.stats().waiting == 0)
    assert engine.stats().finished == {"abort": count}
    assert engine.generate("abc", params())[0].token_ids == expected_tokens(b"abc", 8)
    assert all_pages_are_back(engine)


@pytest.mark.parametrize("goes_on", [True, False])
def test_while_a_stream_waits_it_can_be_read_on_or_left(engine, runner, goes_on):
    runner.gate.clear()
    stream = engine.stream("abc", params(max_tokens=200))
    waits = threading.Event()
    press = press_ctrl_c_when(waits.is_set)
    with pytest.raises(KeyboardInterrupt):
        waits.set()
        next(stream)
    press.join()
    if goes_on:
        runner.gate.set()
        assert [token for output in stream for token in output.token_ids] == expected_tokens(b"abc", 200)
    else:
        stream.close()
        runner.gate.set()
        has_ended(engine)


def test_as_a_stream_is_made_nothing_runs_on_that_nobody_reads(roomy_engine, monkeypatch):
    submit = roomy_engine.core.submit

    def interrupted(submissions):
        submit(submissions)
        raise KeyboardInterrupt

    monkeypatch.setattr(roomy_engine.core, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        roomy_engine.stream("abc", params(max_tokens=ENDLESS))
    with pytest.raises(KeyboardInterrupt):
        roomy_engine.generate(["abc", "def"], params(max_tokens=ENDLESS))
    monkeypatch.undo()
    has_ended(roomy_engine, 3)


@pytest.mark.parametrize("stream", [True, False])
def test_in_an_event_loop_its_tasks_are_cancelled_and_the_engine_serves_the_next_loop(engine, runner, stream):
    loops = []

    async def ask():
        loops.append(asyncio.get_running_loop())
        return [output async for output in AsyncEngine(engine).generate("abc", params(max_tokens=200), stream=stream)]

    def press():
        until(lambda: len(runner.batches) == 2)
        os.kill(os.getpid(), signal.SIGINT)
        # A signal that comes right before the loop's wait does not end it: asyncio.run has no descriptor for them. A
        # loop of a program wakes again; this one, whose engine is still, would not.
        with suppress(RuntimeError):  # it is closed
            loops[0].call_soon_threadsafe(int)

    runner.gate.clear()
    presses, _ = start(press)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(ask())
    presses.join()
    runner.gate.set()
    has_ended(engine)


def test_an_async_engine_in_a_with_is_closed_by_it():
    runner, closed = FakeStepRunner(), []
    engine = fake_engine(runner, shutdown=lambda: closed.append(True))

    async def serve():
        async with AsyncEngine(engine) as served:
            async for _ in served.generate("abc", params(max_tokens=200)):
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(serve())
    assert closed == [True] and not engine.is_alive


def test_a_close_that_is_interrupted_can_be_made_again():
    runner, closed = FakeStepRunner(), []
    engine = fake_engine(runner, shutdown=lambda: closed.append(True))
    runner.gate.clear()
    thread, results = start(engine.generate, ["abc"], params(max_tokens=200))
    press = press_ctrl_c_when(lambda: engine.core._is_closing and len(runner.batches) == 2)
    until(lambda: len(runner.batches) == 2)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    press.join()
    assert closed == []
    runner.gate.set()
    engine.close()
    thread.join()
    assert closed == [True] and results[0][0].finish_reason == "abort"


class TestStart:
    """Of a real engine: what it has taken goes back, and the next start finds all as it was."""

    @pytest.fixture
    def config(self, eager_cache):
        return tiny_config(eager_cache, compile={"backend": "eager"})

    @pytest.mark.parametrize(
        ("owner", "name"),
        [
            (ModelRunner, "init_attention_backend"),
            (assemble, "make_step_runner"),
            (assemble, "_remember"),
            (assemble, "_tell_ready"),
            (threading.Thread, "start"),
            (EngineCore, "start"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_whatever_it_is_at(self, config, owner, name, monkeypatch):
        shutdown, given_back = ModelRunner.shutdown, []
        threads = set(threading.enumerate())

        def interrupted(*args, **kwargs):
            if not (args and getattr(args[0], "name", "mllm-engine") != "mllm-engine"):
                raise KeyboardInterrupt
            thread_start(*args)

        thread_start = threading.Thread.start
        monkeypatch.setattr(owner, name, interrupted)
        monkeypatch.setattr(ModelRunner, "shutdown", lambda self: (given_back.append(True), shutdown(self)))
        with pytest.raises(KeyboardInterrupt):
            Engine(config)
        monkeypatch.undo()
        assert given_back == [True]
        assert set(threading.enumerate()) <= threads
        with Engine(config) as engine:
            assert engine.generate([1], params())[0].finish_reason in ("length", "stop")
