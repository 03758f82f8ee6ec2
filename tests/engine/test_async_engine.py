"""AsyncEngine over a fake model: streams of tasks, cancellation, one engine for threads and tasks."""

import asyncio
import gc
import weakref

import pytest

from mllm_compile.engine.async_engine import AsyncEngine
from mllm_compile.engine.streams import LoopWaker
from mllm_compile.errors import EngineDeadError, MllmError, RequestError
from mllm_compile.runtime.sampling.params import SamplingParams
from tests.fakes import (
    ENDLESS,
    ROOM_FOR_ENDLESS,
    FakeStepRunner,
    StepFailed,
    all_pages_are_back,
    expected_tokens,
    fake_engine,
    recite,
)
from tests.hang_guard import HANG_S, until


def params(**changes):
    return SamplingParams(**({"temperature": 0, "max_tokens": 8} | changes))


def serve(test, runner=None, **changes):
    """Runs `await test(engine, runner)` and checks that all pages are back after it."""

    async def main():
        own_runner = runner or FakeStepRunner()
        async with AsyncEngine(fake_engine(own_runner, **changes)) as engine:
            await asyncio.wait_for(test(engine, own_runner), HANG_S)
            assert not engine.is_alive or await asyncio.to_thread(all_pages_are_back, engine.engine)

    asyncio.run(main())


async def collect(stream):
    return [output async for output in stream]


def test_many_tasks_get_what_each_gets_alone():
    async def test(engine, runner):
        prompts = [[i, i + 1] for i in range(1, 41)]
        streams = await asyncio.gather(*(collect(engine.generate(prompt, params())) for prompt in prompts))
        for prompt, outputs in zip(prompts, streams, strict=True):
            assert [t for output in outputs for t in output.token_ids] == expected_tokens(prompt, 8)
            assert outputs[-1].finished and outputs[-1].finish_reason == "length"

    serve(test)


def test_a_whole_answer_is_the_stream_s_sum():
    async def test(engine, runner):
        (answer,) = await collect(engine.generate("x:", params(max_tokens=50), stream=False))
        outputs = await collect(engine.generate("x:", params(max_tokens=50)))
        assert "".join(output.text for output in outputs) == answer.text == "Grüße, 世界"
        assert [t for output in outputs for t in output.token_ids] == answer.token_ids

    serve(test, FakeStepRunner(recite("Grüße, 世界")))


def test_a_chat_goes_through_the_template():
    async def test(engine, runner):
        (answer,) = await collect(engine.chat([{"role": "user", "content": "hi"}], params(), stream=False))
        assert answer.prompt == "user=hi;assistant="

    serve(test)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("hello", r"messages: expected a list of \{'role': …, 'content': …\}, got str 'hello'"),
        ([{"content": "x"}], "message 0 has no role"),
        ([[{"role": "user", "content": "x"}]], "message 0 is no message"),
    ],
)
def test_a_malformed_conversation_is_refused(messages, said):
    async def test(engine, runner):
        with pytest.raises(RequestError, match=said):
            await collect(engine.chat(messages, params()))

    serve(test)


@pytest.mark.parametrize("stream", [True, False])
def test_cancelling_a_task_aborts_its_request(stream):
    async def test(engine, runner):
        task = asyncio.create_task(collect(engine.generate("abc", params(max_tokens=ENDLESS), stream=stream)))
        while not runner.batches:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while (await engine.stats()).running:
            await asyncio.sleep(0.001)
        assert (await engine.stats()).finished == {"abort": 1}

    serve(test, **ROOM_FOR_ENDLESS)


def test_leaving_the_loop_early_aborts_the_request():
    async def test(engine, runner):
        async for _ in engine.generate("abc", params(max_tokens=ENDLESS)):
            break
        gc.collect()
        while not (await engine.stats()).finished:
            await asyncio.sleep(0.001)
        assert (await engine.stats()).finished == {"abort": 1}

    serve(test, **ROOM_FOR_ENDLESS)


def test_abort_ends_the_stream_with_its_reason():
    async def test(engine, runner):
        reasons = []
        async for output in engine.generate("abc", params(max_tokens=ENDLESS), request_id="mine"):
            reasons.append(output.finish_reason)
            await engine.abort("mine")
        assert reasons[-1] == "abort"

    serve(test, **ROOM_FOR_ENDLESS)


def test_refusals_and_failed_steps_are_raised_where_the_request_was_made():
    async def test(engine, runner):
        with pytest.raises(RequestError, match="empty"):
            await collect(engine.generate(""))
        with pytest.raises(RequestError, match="max_model_len"):
            await collect(engine.generate([1] * 300, params()))
        runner.fail_wait[len(runner.batches) + 2] = StepFailed("boom")
        with pytest.raises(MllmError, match="boom"):
            await collect(engine.generate("abc", params()))
        assert engine.is_alive

    serve(test)


def test_after_close_requests_are_refused():
    async def test(engine, runner):
        await engine.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await collect(engine.generate("abc"))

    serve(test)


def test_threads_and_tasks_share_one_engine():
    async def test(engine, runner):
        whole = asyncio.to_thread(engine.engine.generate, [[i] for i in range(1, 9)], params())
        outputs, streamed = await asyncio.gather(whole, collect(engine.generate([50], params())))
        assert [o.token_ids for o in outputs] == [expected_tokens([i], 8) for i in range(1, 9)]
        assert [t for o in streamed for t in o.token_ids] == expected_tokens([50], 8)

    serve(test)


def test_one_engine_serves_one_event_loop_after_another():
    async_engine = AsyncEngine(fake_engine())
    for _ in range(2):
        outputs = asyncio.run(collect(async_engine.generate("abc", params())))
        assert [t for output in outputs for t in output.token_ids] == expected_tokens(b"abc", 8)
    asyncio.run(async_engine.close())


def test_event_loops_that_are_closed_are_let_go():
    loops = []

    async def ask(engine):
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await collect(engine.generate("abc", params()))

    with fake_engine() as plain:
        engine = AsyncEngine(plain)
        for _ in range(4):
            asyncio.run(ask(engine))
        gc.collect()
        assert [loop() is None for loop in loops[:-1]] == [True] * 3


def test_a_loop_that_is_closed_ahead_of_a_scheduled_call_is_gone():
    loop = asyncio.new_event_loop()
    waker = LoopWaker(loop)
    assert waker.wake(asyncio.Event())
    loop.close()
    assert not waker.wake(asyncio.Event())


def test_a_request_whose_event_loop_is_gone_is_aborted():
    engine = fake_engine(**ROOM_FOR_ENDLESS)
    async_engine = AsyncEngine(engine)
    loop = asyncio.new_event_loop()
    stream = async_engine.generate("abc", params(max_tokens=ENDLESS))
    loop.run_until_complete(stream.__anext__())
    loop.close()
    until(lambda: engine.stats().finished)
    assert engine.stats().finished == {"abort": 1}
    engine.close()
