"""Requests for texts on both sides of the channel: clients that leave, and commands that are of other models."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mllm_compile.engine.pooling.calls import TaskRules
from mllm_compile.engine.pooling.texts import ReadText
from mllm_compile.runtime.pooling.facts import PoolingFacts
from mllm_compile.runtime.pooling.texts import PoolingParams
from mllm_compile.server import about
from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.backend.pooling import PoolingCommands
from mllm_compile.server.flow.admission import Admission
from mllm_compile.server.flow.memory import Memory
from mllm_compile.server.front import Front
from mllm_compile.server.options import ServeOptions
from mllm_compile.server.pooling.answers import _PIECE, numbers
from mllm_compile.server.pooling.calls import PoolingRequests
from mllm_compile.server.pooling.endpoints import Asking, _endpoint
from mllm_compile.server.pooling.fields import EmbedFields
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


async def _load(front: Front) -> Any:
    """The answer of /load."""
    parts: list[Any] = []

    async def send(part: Any) -> None:
        parts.append(part)

    await about.load(front)({}, None, send)  # type: ignore[arg-type]
    return json.loads(parts[-1]["body"])


def test_the_end_of_a_server_ends_requests_for_texts():
    async def end() -> None:
        front = Front(ServeOptions(model="m"), lambda descriptor: [])
        front.admission.engine_ready(2)
        texts = [ReadText(np.array([1]))] * 3
        with front.admission.place() as place:
            place.hold(3)
            assert await _load(front) == {"server_load": 0, "running": 0, "waiting": 3}
            asked = asyncio.ensure_future(front.pooling.run(texts, PoolingParams("embed", ("mean",)), 0))
            await asyncio.sleep(0)
            assert await _load(front) == {"server_load": 1, "running": 1, "waiting": 1}, "a step takes two"
            front.end()
            with pytest.raises(ApiError, match="shutting down"):
                await asked
        assert await _load(front) == {"server_load": 0, "running": 0, "waiting": 0}

    asyncio.run(end())


def test_an_engine_that_began_to_sleep_while_texts_were_read_is_woken():
    order: list[str] = []

    async def facts(model: None) -> None:
        order.append("awake")

    async def run(*asked: Any) -> list[np.ndarray]:
        order.append("asked")
        return []

    front: Any = SimpleNamespace(facts=facts, pooling=SimpleNamespace(run=run))
    model: Any = SimpleNamespace(
        rules=TaskRules(PoolingFacts(task="embed", rules=("mean",), width=1, outputs=1), False)
    )
    texts = [ReadText(np.array([1]))]
    with Admission(None, lambda: 0).place() as place, Memory().share() as share:
        asyncio.run(Asking(front, model, place, share, 9).run(texts, PoolingParams("embed", ("mean",))))
    assert order == ["awake", "asked"]


def _asked(facts: PoolingFacts, memory: Memory, texts: int, params: PoolingParams) -> ApiError | None:
    """The error of a request for so many texts of one token; None: it is answered."""

    async def facts_of(model: None) -> None: ...

    async def run(*asked: Any) -> list[np.ndarray]:
        return []

    front: Any = SimpleNamespace(facts=facts_of, pooling=SimpleNamespace(run=run))
    model: Any = SimpleNamespace(rules=TaskRules(facts, False))
    with Admission(None, lambda: 0).place() as place, memory.share() as share:
        try:
            asyncio.run(Asking(front, model, place, share, 9).run([ReadText(np.array([1]))] * texts, params))
        except ApiError as error:
            return error
    return None


def test_answers_are_among_the_memory_that_requests_hold():
    """Else clients that read slowly make a server hold any number of large ones."""
    memory, facts = Memory(1 << 20), PoolingFacts(task="embed", rules=("mean",), width=1000, outputs=1000)
    params = PoolingParams("embed", ("mean",))
    with memory.share() as other:
        other.hold(1)
        assert _asked(facts, memory, 30, params) is None
        refused = _asked(facts, memory, 40, params)
    assert refused is not None and (refused.status, refused.code) == (429, "too_many_bytes")
    assert _asked(facts, memory, 40, params) is None, "nobody else holds any"
    assert memory.held == 0


def test_a_score_is_one_number_whatever_the_models_width():
    facts = PoolingFacts(task="classify", rules=("cls",), width=1000, outputs=1)
    assert _asked(facts, Memory(), 9000, PoolingParams("classify", ("cls",))) is None


@pytest.mark.parametrize(("count", "thread"), [(8, "MainThread"), (1 << 13, "mllm-texts"), (1 << 20, "mllm-long")])
def test_large_answers_are_made_in_a_thread(count, thread):
    """Else no other client of the server gets a token meanwhile."""
    made: list[str] = []

    def body() -> list[int]:
        made.append(threading.current_thread().name)
        return [1]

    async def answer(asking: Asking, fields: EmbedFields) -> Any:
        asking.num_numbers = count
        return body

    messages = [{"type": "http.request", "body": b'{"inputs": "a"}', "more_body": False}]

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def ask() -> list[Any]:
        front, parts = Front(ServeOptions(model="m"), lambda descriptor: []), []

        async def facts(model: str | None) -> Any:
            return SimpleNamespace(pooling=object())

        async def send(part: Any) -> None:
            parts.append(part)

        front.facts_of_texts = facts  # type: ignore[method-assign]
        scope: Any = {"path": "/embed", "client": ("127.0.0.1", 1), "headers": []}
        await _endpoint(EmbedFields, answer)(front)(scope, receive, send)
        assert front.is_idle
        return parts

    assert json.loads(b"".join(part.get("body", b"") for part in asyncio.run(ask()))) == [1]
    (name,) = made
    assert name.startswith(thread)


def test_numbers_are_json_of_lists_or_base64_in_pieces():
    array = np.random.default_rng(0).standard_normal((70_000, 3)).astype(np.float32)
    assert json.loads(bytes(numbers(array, None))) == array.tolist()
    assert json.loads(bytes(numbers(array[5], "float"))) == array[5].tolist()
    data = base64.b64decode(json.loads(bytes(numbers(array, "base64"))))
    assert array.nbytes > _PIECE and np.array_equal(np.frombuffer(data, "<f4"), array.ravel())


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
