"""The bound on what requests hold together, and work that waits for a thread."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import msgspec
import pytest

from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.flow.memory import Memory, bytes_of_json
from mllm_compile.server.flow.threads import Threads
from mllm_compile.server.http import ClientGoneError, unless_gone
from tests.hang_guard import HANG_S


def test_requests_hold_no_more_than_the_bound_together():
    memory = Memory(100)
    with memory.share() as one:
        one.hold(60)
        with memory.share() as other:
            other.hold(40)
            with pytest.raises(ApiError, match="hold too much memory") as refused:
                other.hold(41)
            assert (refused.value.status, refused.value.retry_after_s, memory.held) == (429, 1, 100)
            one.hold(10)
            other.hold(90)
        assert memory.held == 10
    assert memory.held == 0


def test_a_request_that_is_larger_than_the_bound_is_taken_when_no_other_holds_any():
    memory = Memory(100)
    with memory.share() as one, memory.share() as other:
        one.hold(500)
        with pytest.raises(ApiError):
            other.hold(1)
        one.hold(20)
        other.hold(80)


@pytest.mark.parametrize(
    ("value", "least"),
    [([[] for _ in range(1000)], 56), ([{} for _ in range(1000)], 64), ([{"a": 1} for _ in range(1000)], 184),
     (list(range(10**6, 10**6 + 1000)), 28), ([str(n) for n in range(1000)], 50)],
)  # fmt: skip
def test_what_json_becomes_is_counted(value, least):
    assert bytes_of_json(msgspec.json.encode(value)) >= 1000 * (least + 8)


class Body(bytearray):
    """Bytes whose end can be seen."""


def test_work_that_waits_for_a_thread_goes_with_its_caller():
    async def run() -> None:
        threads, may_go = Threads(1, "test"), threading.Event()
        busy = asyncio.ensure_future(threads.run(may_go.wait, HANG_S))
        await asyncio.sleep(0)
        body = Body()
        seen = weakref.ref(body)
        waiting = asyncio.ensure_future(threads.run(len, body))
        del body
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        del waiting
        assert seen() is None
        busy.cancel()
        await asyncio.sleep(0)
        assert not busy.done(), "its thread runs"
        may_go.set()
        await asyncio.wait({busy})
        assert busy.cancelled()
        assert await threads.run(len, b"abc") == 3

    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(run(), HANG_S))
    finally:
        gc.enable()


def test_a_failure_in_a_thread_leaves_nothing_to_a_collection():
    def fail(body: Body) -> None:
        raise ValueError

    async def run() -> None:
        threads, body = Threads(1, "test"), Body()
        seen = weakref.ref(body)

        async def receive():
            return await asyncio.Event().wait()

        async def work(body: Body) -> None:
            await threads.run(fail, body)

        with pytest.raises(ValueError):
            await unless_gone(work(body), receive)
        del body
        for _ in range(3):
            await asyncio.sleep(0)
        assert seen() is None

    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(run(), HANG_S))
    finally:
        gc.enable()


def test_work_for_a_client_that_leaves_has_ended_when_that_is_told():
    async def run() -> list[str]:
        told: list[str] = []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                told.append("ended")

        async def receive() -> dict[str, str]:
            await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        with pytest.raises(ClientGoneError):
            await unless_gone(work(), receive)
        return told

    assert asyncio.run(asyncio.wait_for(run(), HANG_S)) == ["ended"]
