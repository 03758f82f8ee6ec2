"""However the engine's thread ends, every waiter gets the error, and none waits for ever."""

import asyncio
import ctypes
import gc
import threading
import weakref

import pytest

from mllm_compile.engine.async_engine import AsyncEngine
from mllm_compile.engine.core import end_errors, loop
from mllm_compile.errors import EngineDeadError
from tests.engine.cases import params, start, until
from tests.fakes import ENDLESS, ROOM_FOR_ENDLESS, FakeStepRunner, fake_engine
from tests.hang_guard import HANG_S


class Panic(BaseException):
    """As what Rust code raises: no Exception."""


ENDS = [KeyboardInterrupt, SystemExit, GeneratorExit, Panic]
PLACES = [
    *((place, error) for place in ("schedule", "update", "submit", "wait", "call") for error in ENDS),
    *((place, MemoryError) for place in ("schedule", "update")),  # elsewhere an error like any other
]


def raises(error):
    def fault(*args, **kwargs):
        raise error

    return fault


class Callers:
    """A call with several prompts, a single one, a stream, a task's stream, a task's answer, and a caller that asks for
    figures: all of them wait."""

    def __init__(self, engine, runner):
        runner.gate.clear()
        self.calls = [
            start(engine.generate, ["abc", "def"], params(max_tokens=200)),
            start(engine.generate, "ghi", params(max_tokens=200)),
            start(list, engine.stream("abc", params(max_tokens=200, stop="@@"))),
            start(asyncio.run, collect(engine, stream=True)),
            start(asyncio.run, collect(engine, stream=False)),
        ]
        until(lambda: runner.batches)
        self.calls.append(start(engine.flush_prefix_cache))
        until(lambda: len(engine.core._requests._unanswered) == 6)
        self._gate = runner.gate

    def results(self):
        self._gate.set()
        for thread, _ in self.calls:
            thread.join(HANG_S)
            assert not thread.is_alive(), "somebody waits for ever"
        (several,), *others = [results for _, results in self.calls]
        assert [output.finish_reason for output in several] == ["error"] * 2
        assert len({output.error for output in several}) == 1
        return several[0].error, [result for (result,) in others]


async def collect(engine, stream):
    return [output async for output in AsyncEngine(engine).generate("xyz", params(max_tokens=200), stream=stream)]


@pytest.mark.parametrize(("where", "error"), PLACES)
def test_whatever_ends_the_thread_everybody_is_told(where, error):
    runner = FakeStepRunner()
    with fake_engine(runner) as engine:
        callers = Callers(engine, runner)
        if where in ("schedule", "update"):
            setattr(engine.core._scheduler, where, raises(error))
        elif where == "submit":
            runner.submit = raises(error)
        elif where == "wait":
            runner.fail_wait = dict.fromkeys(range(1000), error())
        else:
            callers.calls.append(start(engine.core._call, raises(error)))
        said, others = callers.results()
        assert f"the engine met an internal error and stopped: {error.__name__}" in said
        for result in others:
            assert result is None or isinstance(result, EngineDeadError), result
        assert not engine.is_alive
        for call in (engine.generate, engine.stream):
            with pytest.raises(EngineDeadError, match=error.__name__):
                call("abc", params())
        assert engine.stats().finished["error"] == 6
        thread = engine.core._thread
        thread.join(HANG_S)
        assert not thread.is_alive()


def test_an_interruption_thrown_into_the_thread_ends_it_as_told():
    """As PyThreadState_SetAsyncExc does, which debuggers and timeouts use."""
    runner = FakeStepRunner()
    with fake_engine(runner, **ROOM_FOR_ENDLESS) as engine:
        thread, results = start(engine.generate, "abc", params(max_tokens=ENDLESS))
        until(lambda: len(runner.batches) > 3)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(engine.core._thread.ident), ctypes.py_object(KeyboardInterrupt)
        )
        thread.join(HANG_S)
        assert isinstance(results[0], EngineDeadError) and "KeyboardInterrupt" in str(results[0])


WAYS_TO_FAIL_WHILE_TELLING = {
    "the words": (end_errors, "stopped"),
    "the log": (loop.logger, "exception"),
    "the scheduler": ("core._scheduler", "abort"),
    "the figures": ("core._recorder", "completion_ended"),
    "the ends": ("core._requests", "fail"),
    "all of it": ("core._requests", "_end_submission"),
}


@pytest.mark.parametrize("how", WAYS_TO_FAIL_WHILE_TELLING)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_way_to_tell_of_an_end_may_fail_too(how, monkeypatch):
    runner = FakeStepRunner()
    with fake_engine(runner) as engine:
        callers = Callers(engine, runner)
        owner, name = WAYS_TO_FAIL_WHILE_TELLING[how]
        if isinstance(owner, str):
            target = engine
            for part in owner.split("."):
                target = getattr(target, part)
            owner = target
        monkeypatch.setattr(owner, name, raises(Panic("again")))
        engine.core._scheduler.update = raises(Panic("first"))
        said, others = callers.results()
        assert ("its reason could not be told" if how == "the words" else "Panic: first") in said
        assert all(result is None or isinstance(result, EngineDeadError) for result in others)
        assert not engine.is_alive
        monkeypatch.undo()


def test_being_interrupted_while_telling_does_not_stop_it(monkeypatch):
    runner = FakeStepRunner()
    with fake_engine(runner) as engine:
        callers = Callers(engine, runner)
        end, tries = engine.core._end, []

        def interrupted(error):
            tries.append(error)
            if len(tries) < 3:
                raise KeyboardInterrupt
            end(error)

        engine.core._end = interrupted
        engine.core._scheduler.update = raises(Panic("first"))
        assert "Panic: first" in callers.results()[0]


def test_a_thread_that_is_gone_without_a_word_takes_no_request():
    with fake_engine() as engine:
        engine.core._surely_end = lambda error: None
        engine.core.post(raises(SystemExit))
        engine.core._thread.join(HANG_S)
        assert not engine.is_alive
        with pytest.raises(EngineDeadError, match="its reason could not be told"):
            engine.generate("abc", params())
        assert engine.stats().finished == {}


def test_a_command_behind_the_one_that_ended_the_thread_is_answered():
    runner = FakeStepRunner()
    with fake_engine(runner) as engine:
        runner.gate.clear()
        busy, _ = start(engine.generate, "abc", params())
        until(lambda: len(runner.batches) == 2)
        engine.core.post(raises(Panic))
        late = [start(engine.generate, [7], params()), start(engine.stats)]
        until(lambda: len(engine.core._inbox) == 3)
        runner.gate.set()
        for thread, results in [(busy, _), *late]:
            thread.join(HANG_S)
            assert results
        assert isinstance(late[0][1][0], EngineDeadError)


def test_a_dead_engine_holds_nothing_that_steps_were_made_with():
    class Tensor:
        pass

    runner = FakeStepRunner()
    held = []

    def submit(batch):
        activations = Tensor()
        held.append(weakref.ref(activations))
        raise Panic

    runner.submit = submit
    with fake_engine(runner) as engine:
        with pytest.raises(EngineDeadError) as raised:
            engine.generate("abc", params())
        engine.core._thread.join(HANG_S)
        whole = weakref.ref(runner)
        del runner, submit
        gc.collect()
        assert raised.value.__cause__ is not None
        assert [ref() for ref in (*held, whole)] == [None, None]


def test_a_start_that_is_interrupted_gives_back(monkeypatch):
    given_back = []
    monkeypatch.setattr(threading.Thread, "start", raises(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        fake_engine(shutdown=lambda: given_back.append(True))
    assert given_back == [True]


def test_the_engines_thread_is_prepared_before_its_first_step(runner):
    prepared = []
    with fake_engine(runner, prepare_thread=lambda: prepared.append(threading.current_thread().name)) as engine:
        engine.generate("abc", params())
    assert prepared == ["mllm-engine"]


def test_a_preparation_that_fails_ends_the_engine_and_nobody_waits_for_ever(runner):
    def fail():
        raise RuntimeError("no such library")

    with fake_engine(runner, prepare_thread=fail) as engine, pytest.raises(EngineDeadError, match="no such library"):
        engine.generate("abc", params())


def test_an_engine_that_is_idle_for_a_second_has_the_collector_see_the_imports(monkeypatch):
    seen = []
    monkeypatch.setattr(loop, "_CLOSED_POLL_S", 0.01)
    monkeypatch.setattr(loop, "see_imports", lambda: seen.append(threading.current_thread().name))
    with fake_engine() as engine:
        until(lambda: seen)
        engine.generate("abc", params())
        before = len(seen)
        until(lambda: len(seen) > before)
    assert set(seen) == {"mllm-engine"}


def test_an_engine_that_this_look_finds_dropped_ends(monkeypatch):
    monkeypatch.setattr(loop, "_CLOSED_POLL_S", 0.01)
    engine = fake_engine()
    engine.itself = engine
    thread, closed = engine.core._thread, []
    engine.core._shutdown = lambda: closed.append(True)
    monkeypatch.setattr(loop, "see_imports", gc.collect)
    del engine
    thread.join(HANG_S)
    assert closed == [True]
