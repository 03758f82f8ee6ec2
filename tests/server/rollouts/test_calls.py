"""Calls that wait for the engine: their answers, their errors, and an engine that is lost with its weights."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from mllm_compile.server.api.errors import ApiError, not_ready
from mllm_compile.server.rl.calls import RolloutCalls
from mllm_compile.server.rl.engine_calls import EngineCalls
from mllm_compile.server.wire.messages import Control, Controlled


def ask(calls: RolloutCalls, sent: list, answer=None, error: str = "", kind: str = ""):
    """The answer to a call, which the engine gives at once."""

    async def run():
        asked = asyncio.ensure_future(calls.ask("finish", version="1"))
        await asyncio.sleep(0)
        calls.over(Controlled(sent[-1].key, answer, error or None, kind))
        return await asked

    return asyncio.run(run())


def test_an_engine_that_is_lost_with_its_weights_answers_nothing_until_it_has_others():
    sent = []
    calls = RolloutCalls(sent.append)
    calls.engine_lost(not_ready("lost", "engine_lost"))
    calls.check_weights()  # it had its first ones
    ask(calls, sent, {"published": "12"})
    calls.check_weights()
    for _ in range(2):
        calls.engine_lost(not_ready("lost", "engine_lost"))
        with pytest.raises(ApiError, match="first weights, not version '12'") as raised:
            calls.check_weights()
        assert (raised.value.status, raised.value.code) == (503, "weights_lost")
    ask(calls, sent, {"published": "13", "is_whole": False})
    with pytest.raises(ApiError, match="first weights, not version '12'"):
        calls.check_weights()
    ask(calls, sent, {"published": "13", "is_whole": True})
    calls.check_weights()


def test_weights_of_a_client_that_has_gone_are_known_to_be_lost():
    async def run():
        sent = []
        calls = RolloutCalls(sent.append)
        asked = asyncio.ensure_future(calls.ask("finish", version="1"))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.sleep(0)
        calls.over(Controlled(sent[-1].key, {"published": "12"}))
        calls.engine_lost(not_ready("lost", "engine_lost"))
        return calls

    with pytest.raises(ApiError, match="not version '12'"):
        asyncio.run(run()).check_weights()


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("WeightUpdateError", 400, "weight_update"),
        ("TransferError", 400, "weight_update"),
        ("UpdateConflictError", 409, "update_conflict"),
        ("EnginePausedError", 503, "paused"),
        ("WeightsTornError", 503, "weights_torn"),
        ("RequestError", 400, None),
    ],
)
def test_an_error_of_the_engine_has_the_status_that_clients_act_on(kind, status, code):
    sent = []
    with pytest.raises(ApiError) as raised:
        ask(RolloutCalls(sent.append), sent, error="why", kind=kind)
    assert (raised.value.status, raised.value.code) == (status, code)


def test_calls_that_wait_are_bounded_and_told_of_an_engine_that_is_lost():
    async def run():
        calls = RolloutCalls(lambda command: None)
        waiting = [asyncio.ensure_future(calls.ask("pause")) for _ in range(64)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as raised:
            await calls.ask("pause")
        waiting.append(asyncio.ensure_future(calls.ask("resume")))  # which ends the others
        await asyncio.sleep(0)
        calls.engine_lost(not_ready("lost", "engine_lost"))
        return raised.value.status, await asyncio.gather(*waiting, return_exceptions=True)

    status, ended = asyncio.run(run())
    assert status == 429
    assert [error.code for error in ended] == ["engine_lost"] * 65


def test_a_trainer_that_joins_anew_may_send_a_version_again(monkeypatch):
    """Its weights are others: an answer from memory would leave its broadcast without a receiver."""
    engine = MagicMock()
    engine.weights = SimpleNamespace(is_open=False, is_torn=False, epoch=1, start=lambda: None, missing=list)
    engine.weights.finish = lambda version: SimpleNamespace(
        version=version, is_whole=True, epoch=1, num_tensors=1, pause_s=0.0
    )
    told: list[Controlled] = []
    calls = EngineCalls(engine, told.append)
    received = []
    monkeypatch.setattr(calls._transfers, "check_named", lambda name: None)
    monkeypatch.setattr(calls._transfers, "receive_bucket", lambda *bucket, is_flat: received.append(bucket))
    monkeypatch.setattr(calls._transfers, "_join", lambda *given: None)

    def answer_of(call, **fields):
        calls._run(Control(0, call, fields))
        assert told[-1].error is None
        return told[-1].answer

    bucket = {"group": "g", "names": ["w"], "dtypes": ["float32"], "shapes": [[1]], "is_flat": True, "version": "1"}
    assert answer_of("receive_bucket", **bucket) == answer_of("receive_bucket", **bucket)
    assert len(received) == 1, "the answer was lost"
    answer_of("join_named", name="g", host="trainer", port=1, rank=1, world_size=2, backend="gloo")
    assert answer_of("receive_bucket", **bucket)["published"] == "1"
    assert len(received) == 2
