"""Sessions of an engine's requests."""

from __future__ import annotations

import asyncio

import pytest

from mllm_compile import AsyncEngine, RequestError, Session
from mllm_compile.engine.sessions import session_key
from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.data_parallel import DataParallelScheduler
from mllm_compile.runtime.schedule.pages.sessions import SessionTag
from mllm_compile.runtime.schedule.request import Request
from tests.engine.cases import params
from tests.fakes import fake_engine

PROMPT = list(range(1, 41))


@pytest.fixture
def engine():
    with fake_engine() as engine:
        yield engine


def test_each_way_of_asking_belongs_to_its_session(engine):
    engine.generate([PROMPT, PROMPT], params(), session=["a", None])
    engine.chat([{"role": "user", "content": "x"}], params(), session="a")
    list(engine.stream(PROMPT, params(), session=Session("a", retention="5m")))
    list(engine.stream_chat([{"role": "user", "content": "x"}], params(), session="a"))
    state = engine.session_state("a")
    assert (state.turns, state.running) == (4, 0)
    assert state.cached_tokens > 0 and state.kept_tokens > 0
    assert engine.end_session("a") and not engine.end_session("a")
    assert engine.session_state("a") is None


def test_an_async_engine_has_them_too(engine):
    async def ask():
        served = AsyncEngine.__new__(AsyncEngine)
        served.engine, served._wakers = engine, {}
        async for _ in served.generate(PROMPT, params(), session="a"):
            pass
        return await served.session_state("a"), await served.end_session("a")

    state, ended = asyncio.run(ask())
    assert state.turns == 1 and ended


def test_a_session_is_of_one_salt(engine):
    engine.generate({"prompt_token_ids": PROMPT, "cache_salt": "mine"}, params(), session="a")
    assert engine.session_state("a") is None and not engine.end_session("a")
    assert engine.session_state("a", "mine").turns == 1


def test_answers_are_those_without_a_session(engine):
    alone = engine.generate(PROMPT, params())[0].token_ids
    for session in ("a", Session(retention="24h"), Session("a", is_one_line=False)):
        assert engine.generate(PROMPT, params(), session=session)[0].token_ids == alone


@pytest.mark.parametrize(
    ("session", "said"),
    [
        ("", "session_id: expected a text of 1 to 256 characters, got 0 characters"),
        ("x" * (1 << 20), "session_id: expected a text of 1 to 256 characters, got 1,048,576 characters"),
        (7, "session: expected one, or one for each of the 1 prompts, got int 7"),
        (["a", "b"], "session: expected one, or one for each of the 1 prompts, got 2"),
        ([7], "session_id: expected a text of 1 to 256 characters, got int 7"),
    ],
)
def test_a_wrong_session_is_refused(engine, session, said):
    with pytest.raises(RequestError, match=said):
        engine.generate(PROMPT, params(), session=session)


def test_a_wrong_retention_is_refused():
    with pytest.raises(RequestError, match="retention: expected 5m, 1h or 24h, got '2h'"):
        Session("a", retention="2h")


def test_a_request_that_is_aborted_while_it_waits_has_ended(engine):
    scheduler = engine.core._scheduler
    request = Request(request_id="r", prompt_token_ids=PROMPT, params=params(), session_tag=SessionTag("k"))

    def add_and_abort():
        scheduler.add(request)
        scheduler.abort(request)
        return scheduler.session_state("k")

    state = engine.core.between_steps(add_and_abort)
    assert (state.running, state.turns, state.kept_tokens) == (0, 1, 0)


def test_ranks_with_requests_of_their_own_tell_of_all():
    limits = SchedulerConfig(
        max_running_requests=2, max_num_batched_tokens=64, max_model_len=64, page_size=4, num_pages=40
    )
    ranks = DataParallelScheduler(limits, 2)
    for name in "abc":
        ranks.add(Request(request_id=name, prompt_token_ids=PROMPT, params=params(), session_tag=SessionTag("k")))
    assert ranks.session_state("k").running == 3 and ranks.session_state("other") is None
    assert ranks.end_session("k") and not ranks.end_session("k")


def test_keys_are_of_a_few_bytes_whatever_the_salt_is():
    assert len(session_key("a", "x" * (1 << 20))) == 16
    assert session_key("a", None) != session_key("a", "None")
