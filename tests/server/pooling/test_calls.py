"""Requests for texts on both sides of the channel: clients that leave, and commands that are of other models."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from mllm_compile.engine.pooling.texts import ReadText
from mllm_compile.runtime.pooling.texts import PoolingParams
from mllm_compile.server.backend.pooling import PoolingCommands
from mllm_compile.server.pooling.calls import PoolingRequests
from mllm_compile.server.wire.messages import Abort, AskSession, Control, LoadAdapter, Pool, SessionTold, UnloadAdapter
from tests.fake_pooling import fake_pooling_engine


def test_a_client_that_leaves_takes_its_request_back():
    sent: list[Any] = []

    async def leave() -> None:
        requests = PoolingRequests(sent.append)
        texts = [ReadText(np.array([1]))]
        asked = asyncio.ensure_future(requests.run(texts, PoolingParams("embed", ("mean",)), 0))
        await asyncio.sleep(0)
        assert not requests.is_idle
        asked.cancel()
        await asyncio.wait([asked])
        assert requests.is_idle, "else departed clients fill the queue for good"

    asyncio.run(leave())
    pool, abort = sent
    assert isinstance(pool, Pool) and abort == Abort(pool.key)


@pytest.mark.parametrize(
    "command",
    [Control(3, "pause", {}), LoadAdapter(3, "a", "/a", False), UnloadAdapter(3, "a"), AskSession(3, "a", None, False)],
)
def test_a_command_of_models_that_generate_is_answered(command):
    told: list[Any] = []
    with fake_pooling_engine(None, {}) as engine:
        PoolingCommands(engine, told.append).take(command)
    (event,) = told
    assert event.key == 3
    if not isinstance(event, SessionTold):
        assert event.error.startswith("the model pools") and event.error_kind == "RequestError"
