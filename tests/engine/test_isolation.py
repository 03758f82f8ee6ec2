"""Isolation: a changed output, another caller's id, a fork, and garbage collection reach no other request."""

import os
import signal
import threading

import pytest

from mllm_compile.errors import EngineDeadError
from tests.engine.cases import params, until
from tests.fakes import ENDLESS, ROOM_FOR_ENDLESS, FakeStepRunner, expected_tokens, fake_engine
from tests.hang_guard import HANG_S

PROMPT = list(range(1, 40))  # more than a page


@pytest.mark.parametrize("n", [1, 3])
def test_what_is_done_to_a_stream_s_output_does_not_reach_the_engine(engine, n):
    wish = params(n=n, temperature=1.0 if n > 1 else 0, seed=7, max_tokens=40)
    whole = [completion.token_ids for completion in engine.generate(PROMPT, wish)[0].outputs]
    engine.flush_prefix_cache()
    taken = [[] for _ in range(n)]
    for output in engine.stream(PROMPT, wish):
        for completion in output.outputs:
            taken[completion.index] += completion.token_ids
            completion.token_ids.clear()
        output.prompt_token_ids.insert(0, 9)
    assert taken == whole
    assert engine.generate(PROMPT, wish)[0].prompt_token_ids == PROMPT


def test_what_is_done_to_an_answer_does_not_reach_the_engine(engine, runner):
    """Its last step may still be in flight, and what it computed is cached by its ids afterwards."""
    runner.delay_s = 0.002
    others = engine.stream(PROMPT[::-1], params(max_tokens=200))
    for _ in range(10):
        answer = engine.generate(PROMPT, params(stop_token_ids=[expected_tokens(PROMPT, 3)[-1]]))[0]
        answer.prompt_token_ids.clear()
        answer.token_ids.clear()
    others.close()
    assert engine.is_alive
    assert engine.generate(PROMPT, params())[0].token_ids == expected_tokens(PROMPT, 8)


def test_no_id_of_somebody_s_own_is_in_the_way_of_another_request(engine, runner):
    runner.gate.clear()
    names = [f"req-{number}" for number in range(4)] + ["y/0", "y/1"]
    streams = [engine.stream("abc", params(), request_id=name) for name in names]
    several = engine.stream("abc", params(n=2, temperature=1.0), request_id="y")
    unnamed = engine.stream("abc", params())
    engine.abort("y/1")
    runner.gate.set()
    assert [list(stream)[-1].finish_reason for stream in streams] == ["length"] * 5 + ["abort"]
    assert {part.index: part.finish_reason for output in several for part in output.outputs} == dict.fromkeys(
        (0, 1), "length"
    )
    assert list(unnamed)[-1].finish_reason == "length"


def test_a_fork_is_told_that_the_engine_is_not_here(engine, runner):
    stream = engine.stream("abc", params(max_tokens=200))
    next(stream)
    holds, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        with engine.core._condition:
            holds.set()
            may_go.wait(HANG_S)

    holder = threading.Thread(target=hold)
    holder.start()
    holds.wait(HANG_S)
    child = os.fork()  # while a thread that will not be there holds the lock
    if child == 0:
        signal.alarm(int(HANG_S))  # a waiter for the thread would wait for ever
        try:
            with pytest.raises(EngineDeadError, match="Make an Engine here"):
                list(stream)
            with pytest.raises(EngineDeadError, match=f"in process {os.getppid()}; this process is a fork of it"):
                engine.generate("abc", params())
            with pytest.raises(EngineDeadError, match="Make an Engine here"):
                engine.stream("abc", params())
            assert not engine.is_alive
            for ask in (engine.stats, engine.flush_prefix_cache):
                with pytest.raises(EngineDeadError, match="Make an Engine here"):
                    ask()
            stream.close()
            engine.close()
            with fake_engine() as own:
                assert own.generate([1], params())[0].token_ids == expected_tokens([1], 8)
        except BaseException:
            os._exit(1)
        os._exit(0)
    may_go.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(stream)[-1].finish_reason == "length"


def test_an_engine_that_ends_on_its_own_thread_gives_back_after_its_last_step():
    """As when a collection of garbage, which may happen on any thread, finds it."""
    runner = FakeStepRunner()
    events: list[tuple[str, bool]] = []

    def shutdown() -> None:
        events.append((threading.current_thread().name, engine.is_alive))

    engine = fake_engine(runner, shutdown=shutdown, **ROOM_FOR_ENDLESS)
    stream = engine.stream("abc", params(max_tokens=ENDLESS))
    next(stream)
    engine.core.post(engine.close)
    until(lambda: events)
    assert events == [("mllm-engine", False)], "no step runs any more"
    assert list(stream)[-1].finish_reason == "abort"
    engine.core._thread.join(HANG_S)
    engine.close()
    assert len(events) == 1


@pytest.mark.parametrize("prompt", [[5], PROMPT], ids=["queued at once", "after the first"])
def test_a_request_after_many_answers_to_one_prompt_waits_for_the_running_ones_alone(prompt):
    runner = FakeStepRunner(gate_from=5)
    runner.gate.clear()
    with fake_engine(runner) as engine:  # runs four at once
        many = engine.stream(prompt, params(n=60, temperature=1.0, max_tokens=8))
        until(lambda: len(runner.batches) >= 6)  # the siblings of the first have come too
        num_before = len({r for batch in list(runner.batches) for r in batch.admitted})
        after = engine.stream([9], params())
        runner.gate.set()
        assert [token for output in after for token in output.token_ids] == expected_tokens([9], 8)
        taken = [[] for _ in range(60)]
        for output in many:
            for completion in output.outputs:
                taken[completion.index] += completion.token_ids
    assert taken == [expected_tokens(prompt, 8)] * 60
    first = next(i for i, batch in enumerate(runner.batches) if any(r.prompt_token_ids == [9] for r in batch.requests))
    num_earlier = len({r for batch in runner.batches[:first] for r in batch.admitted})
    assert num_earlier - num_before <= 8, "those that were queued when it came, and a round while it was on its way"
