"""One model of several, and what it asks of its engine."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest

from mllm_compile.process.passage import Passage
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.server.api.answers import CompletionAnswers
from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.backend import process
from mllm_compile.server.flow.choice import PromptRun
from mllm_compile.server.flow.dispatcher import Dispatcher
from mllm_compile.server.flow.job import Job
from mllm_compile.server.flow.memory import Memory
from mllm_compile.server.flow.writer import Outlet
from mllm_compile.server.models import tenant as tenant_module
from mllm_compile.server.models.front import ModelsFront
from mllm_compile.server.models.shares import Share
from mllm_compile.server.models.tenant import Tenant
from mllm_compile.server.options import ModelsOptions, ServeOptions
from mllm_compile.server.supervisor import READY
from mllm_compile.server.wire.messages import Abort, AdaptersChanged, Needs, Stage


def _tenant() -> Tenant:
    """A model whose engine has started, and is parked."""
    options = ServeOptions(model="a", served_names=("a",))
    tenant = Tenant("a", options, lambda descriptor: [], None, Memory(), False, lambda: None)
    tenant.share, tenant._is_started, tenant.is_alive = Share(1, 1, 1), True, True
    return tenant


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_engine_that_cannot_be_woken_gives_back_what_it_has_taken(is_lost):
    async def work() -> list[str]:
        tenant, asked = _tenant(), []

        async def ask(call: str) -> Any:
            asked.append(call)
            if call == "wake_up":
                if is_lost:
                    tenant.gone()
                raise ApiError(503, "its weights fit, its KV cache does not")

        tenant.front.rollouts.ask = ask  # type: ignore[union-attr,method-assign]
        with pytest.raises(ApiError, match="does not"):
            await tenant.take([])
        assert not tenant.is_awake
        return asked

    assert asyncio.run(work()) == (["wake_up"] if is_lost else ["wake_up", "park"])


def test_a_new_engine_can_be_parked_where_the_one_before_it_could_not():
    async def work() -> None:
        tenant = _tenant()
        tenant.is_pinned = True  # as the broker has it of one that cannot
        tenant.gone()
        assert not tenant.is_pinned

    asyncio.run(work())


def test_a_model_that_is_woken_for_an_adapter_is_not_idle_until_that_is_loaded():
    async def work() -> None:
        tenant = _tenant()
        front, supervisor = tenant.front, tenant.front.supervisor
        supervisor.set_aside()
        supervisor.facts = Any  # type: ignore[assignment]

        async def load() -> None:
            await supervisor.ready()
            await front.adapter_changes.load("x", "/x", replace=False)

        loading = asyncio.ensure_future(load())
        await asyncio.sleep(0)
        supervisor.go_on()
        assert not tenant.is_idle, "else the broker parks it before its caller has looked"
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert supervisor.state == READY and not tenant.is_idle
        front.adapter_changes.over(AdaptersChanged(0, []))
        await loading
        assert tenant.is_idle

    asyncio.run(work())


def test_an_engine_that_does_not_answer_its_broker_is_ended(monkeypatch):
    monkeypatch.setattr(tenant_module, "_MOST_S", 0.01)
    killed: list[bool] = []

    async def work() -> None:
        tenant = _tenant()
        passage, its_passage = Passage.pair()
        tenant.front.supervisor._link = SimpleNamespace(
            kill=lambda: killed.append(True), send=lambda command: None, passage=passage
        )
        end, memory = os.pipe()
        engine = Passage(its_passage)
        engine.give([memory])  # and then it hangs
        with pytest.raises(ApiError, match=r"has not answered park for 0.01 s"):
            await tenant.park()
        os.set_blocking(end, False)
        assert os.read(end, 1) == b"", "its memory is held, and no model has it"
        os.close(end)
        passage.close()
        engine.close()

    asyncio.run(work())
    assert killed


@pytest.mark.parametrize("hangs", [True, False])
def test_a_start_that_hangs_is_ended_and_one_that_goes_on_is_not(hangs, monkeypatch):
    """A start holds up the switches of all models. What it has waited for memory ahead is no part of it."""
    monkeypatch.setattr(tenant_module, "_LOOK_S", 0.001)
    monkeypatch.setattr(tenant_module, "_MOST_STAGE_S", 0.0 if hangs else 50.0)
    killed: list[bool] = []

    async def work() -> None:
        tenant = _tenant()
        tenant._is_started = False
        supervisor = tenant.front.supervisor

        def kill() -> None:
            killed.append(True)
            tenant.gone()  # as the supervisor says when the process has ended

        supervisor._link = SimpleNamespace(kill=kill, send=lambda command: None)  # type: ignore[assignment]
        supervisor._on_event(Stage("wait for memory"))
        supervisor.stage_alive_s = -1e9
        taking = asyncio.ensure_future(tenant.take([]))
        if not hangs:
            await _looks()
            assert not killed and not taking.done()
            for _ in range(2):  # a stage that goes on is named again
                supervisor.stage_alive_s = -1e9
                supervisor._on_event(Stage("load weights"))
                await _looks()
                assert not killed and not taking.done()
            tenant.ready((1, 1))
        await taking
        if hangs:
            assert supervisor._failure is not None
            assert supervisor._failure.message == "its start hangs: nothing of wait for memory for 0 s"

    asyncio.run(work())
    assert killed == [True] * hangs


def test_a_stage_that_counts_is_told_again(monkeypatch):
    monkeypatch.setattr(process, "_SIGN_S", 0.0)
    told: list[str] = []
    reporter = process._StageTeller(NullReporter(), told.append)
    with reporter.stage("load weights", 2) as stage:
        stage.advance()
        assert told == ["load weights"] * 2
        monkeypatch.setattr(process, "_SIGN_S", 1e9)
        stage.advance()
        stage.advance()
    assert told == ["load weights"] * 3, "not with each count"


async def _looks() -> None:
    """Time for some of a tenant's looks at its start."""
    for _ in range(20):
        await asyncio.sleep(0.001)


def test_requests_within_a_parked_engine_are_told_that_it_cannot_be_woken():
    """Else each waits for its own timeout, if it has one."""

    async def work() -> None:
        front = _tenant().front
        sent: list[Any] = []
        front.supervisor.send = sent.append  # type: ignore[method-assign]
        front.dispatcher = Dispatcher(sent.append, front.admission.leave)
        job = Job(
            "cmpl-1",
            CompletionAnswers({"id": "cmpl-1", "created": 0, "model": "a", "system_fingerprint": None}, None),
            Outlet(_forget),
            is_stream=False,
            stream_interval=1,
            headers=[],
            cancel=front.dispatcher.cancel,
            on_over=lambda job: None,
        )
        job.add(PromptRun(front.dispatcher.next_key(), [1, 2], None, False), SamplingParams(), None)
        front.admission.enter(1)
        front.dispatcher.start(job, SamplingParams(), 0, None, None)
        front.supervisor.set_aside()
        front.refuse(ApiError(503, "others hold its memory", code="no_memory"))
        assert job.is_over and job.error is not None and job.error.code == "no_memory"
        assert front.is_idle and isinstance(sent[-1], Abort), "the engine is told"

    asyncio.run(work())


async def _forget(message: Any) -> None:
    return None


def test_a_model_that_died_before_memory_is_given_gets_none():
    async def work() -> None:
        several = ModelsOptions(sources={"a": "a", "b": "b"})
        server = ModelsFront(ServeOptions(model=""), several, lambda own: lambda descriptor: [], None, print)
        for tenant in server.engines.values():
            tenant.needs = Needs("cuda:0", 100, 100, 100, 0, 90, 1, 10, 10)
        server.engines["a"].front.supervisor.failure = "its process ended"
        sharing = asyncio.ensure_future(server._share_out())
        await asyncio.sleep(0)
        (broker,) = server.brokers
        assert broker.tenants == [server.engines["b"]]
        sharing.cancel()

    asyncio.run(work())
