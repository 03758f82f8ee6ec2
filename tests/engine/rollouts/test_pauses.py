"""A paused engine runs no steps; what becomes of its requests follows from the mode."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from mllm_compile import Engine, SamplingParams
from mllm_compile.errors import EnginePausedError, RequestError, UpdateConflictError
from tests.fakes import ENDLESS, ROOM_FOR_ENDLESS, FakeStepRunner, all_pages_are_back, expected_tokens, fake_engine
from tests.hang_guard import HANG_S, until

PROMPT = list(range(97, 117))
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)
WITHOUT_END = SamplingParams(max_tokens=ENDLESS, ignore_eos=True)


def beside(function: Callable[..., Any], *args: Any) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function, *args)
    pool.shutdown(wait=False)
    return future


def started(engine: Engine, params: SamplingParams) -> tuple[Any, list[int]]:
    """A stream that has its first tokens."""
    stream = engine.stream(PROMPT, params)
    return stream, list(next(stream).token_ids)


def rest(stream: Any, tokens: list[int]) -> list[int]:
    for output in stream:
        tokens += output.token_ids
    return tokens


@pytest.mark.parametrize("mode", ["keep", "retract"])
def test_kept_requests_go_on_as_if_nothing_had_been(mode):
    with fake_engine() as engine:
        stream, tokens = started(engine, LONG)
        engine.pause(mode)
        assert engine.state == "paused" and engine.is_paused
        held = engine.stats().held_seconds
        until(lambda: engine.stats().held_seconds > held > 0, "it says since when")
        steps = engine.stats().steps
        newcomer = beside(engine.generate, PROMPT, SHORT)
        until(lambda: engine.stats().waiting + engine.stats().running == 2, "the newcomer is queued")
        assert engine.stats().steps == steps, "no step runs"
        engine.resume()
        assert engine.stats().held_seconds == 0
        assert rest(stream, tokens) == expected_tokens(PROMPT, 200)
        assert newcomer.result(HANG_S)[0].token_ids == expected_tokens(PROMPT, 8)
        assert (engine.stats().preemptions > 0) == (mode == "retract")
        assert all_pages_are_back(engine)


def test_a_flush_may_take_the_keys_of_what_runs_too():
    with fake_engine() as engine:
        stream, tokens = started(engine, LONG)
        engine.pause("keep")
        engine.flush_prefix_cache()
        assert engine.stats().preemptions == 0
        engine.flush_prefix_cache(retracts=True)
        assert engine.stats().preemptions == 1
        engine.resume()
        assert rest(stream, tokens) == expected_tokens(PROMPT, 200)
        assert all_pages_are_back(engine)


def test_aborted_requests_have_their_tokens_and_new_ones_are_refused():
    with fake_engine(**ROOM_FOR_ENDLESS) as engine:
        stream, tokens = started(engine, WITHOUT_END)
        engine.pause("abort")
        outputs = list(stream)
        tokens += [token for output in outputs for token in output.token_ids]
        assert outputs[-1].finish_reason == "abort" and tokens == expected_tokens(PROMPT, len(tokens))
        with pytest.raises(EnginePausedError, match=r"paused \(mode 'abort'\) and takes no requests"):
            engine.generate(PROMPT, SHORT)
        engine.resume()
        assert engine.generate(PROMPT, SHORT)[0].token_ids == expected_tokens(PROMPT, 8)


def test_a_pause_may_wait_for_requests():
    with fake_engine() as engine:
        stream, tokens = started(engine, LONG)
        waiting = beside(engine.pause, "wait")
        assert rest(stream, tokens) == expected_tokens(PROMPT, 200)
        waiting.result(HANG_S)
        assert engine.state == "paused"
        with pytest.raises(EnginePausedError, match="paused"):
            engine.generate(PROMPT, SHORT)


def test_a_wait_for_requests_ends_by_their_abort_or_by_resume():
    with fake_engine(**ROOM_FOR_ENDLESS) as engine:
        stream, _ = started(engine, WITHOUT_END)
        waiting = beside(engine.pause, "wait")
        until(lambda: engine.state == "pausing")
        engine.resume()
        with pytest.raises(UpdateConflictError, match="resumed before its requests had ended"):
            waiting.result(HANG_S)
        assert engine.state == "running"
        waiting = beside(engine.pause, "wait")
        until(lambda: engine.state == "pausing")
        engine.pause("abort")
        waiting.result(HANG_S)
        assert engine.state == "paused" and list(stream)[-1].finish_reason == "abort"


def test_calls_may_be_repeated_and_a_stricter_pause_counts():
    with fake_engine(**ROOM_FOR_ENDLESS) as engine:
        engine.resume()
        stream, _ = started(engine, WITHOUT_END)
        for mode in ("keep", "keep", "abort", "keep"):
            engine.pause(mode)
        assert list(stream)[-1].finish_reason == "abort"
        with pytest.raises(EnginePausedError, match="takes no requests"):
            engine.generate(PROMPT, SHORT)
        engine.resume()
        engine.resume()
        assert engine.generate(PROMPT, SHORT)[0].finish_reason == "length"
        with pytest.raises(RequestError, match="expected one of abort, wait, keep, retract, got 'stop'"):
            engine.pause("stop")


@pytest.mark.parametrize("mode", ["keep", "retract", "wait"])
def test_a_paused_engine_can_be_closed(mode):
    engine = fake_engine(**ROOM_FOR_ENDLESS)
    stream, _ = started(engine, WITHOUT_END)
    paused = beside(engine.pause, mode)
    until(lambda: engine.state != "running")
    closing = threading.Thread(target=engine.close)
    closing.start()
    closing.join(HANG_S)
    assert not closing.is_alive() and list(stream)[-1].finish_reason == "abort"
    assert paused.exception(HANG_S) is None or mode == "wait"


def test_a_pause_waits_for_the_step_in_flight():
    runner = FakeStepRunner(gate_from=1)
    runner.gate.clear()
    with fake_engine(runner) as engine:
        answer = beside(engine.generate, PROMPT, SHORT)
        until(lambda: len(runner.batches) > 1)
        paused = beside(engine.pause, "keep")
        until(lambda: engine.state == "paused")
        assert not paused.done()
        runner.gate.set()
        paused.result(HANG_S)
        engine.resume()
        assert answer.result(HANG_S)[0].token_ids == expected_tokens(PROMPT, 8)
