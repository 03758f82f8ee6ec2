"""The thread of an engine that pools: texts of several calls in one step, and faults that hurt one call alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import pytest

from mllm_compile.engine.pooling import core as module
from mllm_compile.engine.pooling.core import Answers, PoolingCore
from mllm_compile.errors import EngineDeadError, MllmError
from mllm_compile.runtime.pooling.queue import TextQueue
from mllm_compile.runtime.pooling.texts import PackedText, PoolingParams
from tests.hang_guard import until

PARAMS = PoolingParams("embed", ("mean",))


class _Begun:
    """A step whose answers come when they are asked for."""

    def __init__(self, answers: Callable[[], Answers], is_over: bool = True) -> None:
        self.answers, self._is_over = answers, is_over

    def is_over(self) -> bool:
        return self._is_over


class _Runner:
    is_asynchronous = True

    def __init__(self, run: Callable[[Sequence[PackedText]], Answers]) -> None:
        self.steps: list[list[int]] = []
        self._run = run

    def launch(self, texts: Sequence[PackedText]) -> _Begun:
        self.steps.append([int(text.ids[0]) for text in texts])
        return _Begun(lambda: self._run(texts))


def _texts(*numbers: int) -> list[PackedText]:
    return [PackedText(np.array([number]), PARAMS) for number in numbers]


def _as_they_are(texts: Sequence[PackedText]) -> Answers:
    return [text.ids.astype(np.float32) for text in texts]


def _core(runner: _Runner, most_texts: int = 8) -> PoolingCore:
    return PoolingCore(runner, TextQueue(100, most_texts))


def _values(future: Future[Answers]) -> list[float]:
    until(future.done)
    return [float(one[0]) for one in future.result()]


def test_calls_that_wait_share_a_step() -> None:
    runner = _Runner(_as_they_are)
    core = _core(runner)
    futures = [core.submit(_texts(1, 2)), core.submit(_texts(3))]
    core.start()
    assert [_values(future) for future in futures] == [[1, 2], [3]]
    assert len(runner.steps) == 1 and core.num_texts == 3 and core.num_waiting == 0
    core.close()


def test_a_step_that_fails_fails_its_calls_and_no_other() -> None:
    def run(texts: Sequence[PackedText]) -> Answers:
        if texts[0].ids[0] == 1:
            raise RuntimeError("broken")
        return _as_they_are(texts)

    core = _core(_Runner(run), most_texts=1)
    futures = [core.submit(_texts(1, 1)), core.submit(_texts(3))]
    core.start()
    until(futures[0].done)
    with pytest.raises(MllmError, match="broken"):
        futures[0].result()
    assert _values(futures[1]) == [3]
    core.close()


def test_an_answer_of_nan_is_an_error_of_its_call_alone() -> None:
    core = _core(_Runner(lambda texts: [np.array([np.nan if text.ids[0] == 1 else 0.0]) for text in texts]))
    futures = [core.submit(_texts(0, 1)), core.submit(_texts(0))]
    core.start()
    until(futures[0].done)
    with pytest.raises(MllmError, match="NaN or inf"):
        futures[0].result()
    assert _values(futures[1]) == [0]
    core.close()


def test_a_cancelled_call_is_not_run() -> None:
    runner = _Runner(_as_they_are)
    core = _core(runner)
    gone, other = core.submit(_texts(1, 1, 1)), core.submit(_texts(2))
    assert gone.cancel()
    core.start()
    assert _values(other) == [2] and runner.steps == [[2]]
    assert core.end_error is None and core.num_waiting == core.num_calls == 0
    core.close()


def test_a_closed_engine_ends_its_calls() -> None:
    core = _core(_Runner(_as_they_are))
    core.start()
    core.close()
    with pytest.raises(EngineDeadError, match="closed"):
        core.submit(_texts(1))


def test_a_step_begins_before_the_answers_of_the_one_ahead_are_read() -> None:
    events: list[str] = []

    class Runner:
        is_asynchronous = True

        def launch(self, texts: Sequence[PackedText]) -> _Begun:
            number = int(texts[0].ids[0])
            events.append(f"begin {number}")

            def answers() -> Answers:
                events.append(f"read {number}")
                return _as_they_are(texts)

            return _Begun(answers)

    core = PoolingCore(Runner(), TextQueue(100, 1))
    future = core.submit(_texts(1, 2, 3))
    core.start()
    assert _values(future) == [1, 2, 3]
    assert events == ["begin 1", "begin 2", "read 1", "begin 3", "read 2", "read 3"]
    core.close()


def test_promised_texts_begin_while_a_step_runs() -> None:
    events: list[str] = []

    class Runner:
        is_asynchronous = True

        def launch(self, texts: Sequence[PackedText]) -> _Begun:
            number = int(texts[0].ids[0])
            events.append(f"begin {number}")

            def answers() -> Answers:
                events.append(f"read {number}")
                return _as_they_are(texts)

            return _Begun(answers, is_over=number > 1)

    core = PoolingCore(Runner(), TextQueue(100, 1))
    core.start()
    with core.reading():
        first = core.submit(_texts(1))
        core.give_way(first)
        assert events == ["begin 1"], "its end is not waited for"
        second = core.submit(_texts(2))
        core.give_way(second)
    assert [_values(first), _values(second)] == [[1], [2]]
    assert events == ["begin 1", "begin 2", "read 1", "read 2"]
    core.close()


def test_who_gives_way_to_a_call_that_fails_goes_on() -> None:
    class Runner:
        is_asynchronous = True

        def launch(self, texts: Sequence[PackedText]) -> _Begun:
            raise RuntimeError("broken")

    core = PoolingCore(Runner(), TextQueue(100, 1))
    future = core.submit(_texts(1, 2))
    core.start()
    core.give_way(future)
    with pytest.raises(MllmError, match="broken"):
        future.result()
    core.close()


def test_a_step_that_cannot_be_asked_whether_it_is_over_says_why_itself() -> None:
    """As of a device that is lost, which refuses any call."""

    class Lost(_Begun):
        def is_over(self) -> bool:
            raise RuntimeError("illegal address")

    class Runner:
        is_asynchronous = True

        def launch(self, texts: Sequence[PackedText]) -> _Begun:
            def answers() -> Answers:
                raise RuntimeError("illegal address")

            return Lost(answers)

    core = PoolingCore(Runner(), TextQueue(100, 1))
    core.start()
    with core.reading():
        future = core.submit(_texts(1))
        with pytest.raises(MllmError, match=r"a step of 1 texts failed: RuntimeError: illegal address"):
            future.result()
    core.close()


def test_answers_that_are_there_do_not_wait_for_the_next_step() -> None:
    done: list[bool] = []

    class Runner:
        is_asynchronous = False

        def launch(self, texts: Sequence[PackedText]) -> _Begun:
            if texts[0].ids[0] == 2:
                done.append(first.done())
            return _Begun(lambda: _as_they_are(texts))

    core = PoolingCore(Runner(), TextQueue(100, 1))
    first, second = core.submit(_texts(1)), core.submit(_texts(2))
    core.start()
    assert _values(second) == [2]
    assert done == [True]
    core.close()


def test_a_step_that_cannot_begin_fails_its_calls_and_no_other() -> None:
    class Runner:
        is_asynchronous = True

        def launch(self, texts: Sequence[PackedText]) -> _Begun:
            if texts[0].ids[0] == 2:
                raise RuntimeError("broken")
            return _Begun(lambda: _as_they_are(texts))

    core = PoolingCore(Runner(), TextQueue(100, 1))
    futures = [core.submit(_texts(number)) for number in (1, 2, 3)]
    core.start()
    until(futures[1].done)
    with pytest.raises(MllmError, match="broken"):
        futures[1].result()
    assert [_values(futures[0]), _values(futures[2])] == [[1], [3]]
    core.close()


def test_an_idle_engine_that_the_collector_finds_dropped_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    running = _core(_Runner(_as_they_are))

    def find_it() -> None:
        running.close()

    monkeypatch.setattr(module, "_CLOSED_POLL_S", 0.01)
    monkeypatch.setattr(module, "see_imports", find_it)
    running.start()
    until(lambda: not running._thread.is_alive())
