"""The table of docs/sessions.md: each feature works with sessions as it says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mllm_compile.engine.cache_salt import request_salt
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.schedule.data_parallel import DataParallelScheduler
from mllm_compile.runtime.schedule.pages.sessions import SessionTag
from mllm_compile.runtime.schedule.pages.tables import PageTables
from mllm_compile.runtime.schedule.request import Request
from tests.engine.cases import params
from tests.engine.test_speculation import engine_of
from tests.fakes import all_pages_are_back, fake_engine, scheduler_config

PAGE = Path(__file__).parents[2] / "docs" / "sessions.md"
PROMPT = list(range(1, 33))
ADAPTER = type("Adapter", (), {"digest": "d"})


def tagged(salt, token_ids=PROMPT, snapshots=0):
    """A cache of a session whose only request has ended, and its pages."""
    tables = PageTables(4, 64, 64, 4, snapshots)
    sessions, tokens = tables.cache.sessions, np.array(token_ids, np.int64)
    session = sessions.begin(SessionTag("s"))
    tables.attach_prefix(0, tokens[:-1], salt)
    tables.grow(0, tokens.size // 4)
    sessions.over(session, tokens.size, 0)
    end = tables.publish_and_release(0, tokens, tokens.size, salt)
    sessions.used([(run, False) for run in tables.cache.path_of(end)], session, SessionTag("s"))
    return tables, tokens


def salts():
    for salt in ((), request_salt("mine", ADAPTER)):
        for tokens in (PROMPT, [*PROMPT[:16], *[1 << 62] * 16]):  # keys of images have 63 bits
            tables, ids = tagged(salt, tokens)
            tables.grow(1, 8)
            tables.publish_and_release(1, ids + 1000, 32, salt)  # others' pages, used later
            assert tables.cache.sessions.state("s").kept_tokens == 32
            assert tables.cache.sessions.end("s")
            tables.allocator.free(tables.cache.evict(8))
            assert tables.cache.match_prefix(ids, salt)[1].size == 0
            assert tables.cache.match_prefix(ids + 1000, salt)[1].size == 8


def speculates():
    def tokens(kind, session):
        with engine_of(kind) as engine:
            first = engine.generate(PROMPT, params(), session=session)[0].token_ids
            again = engine.generate([*PROMPT, *first], params(), session=session)[0].token_ids
            assert session is None or engine.session_state(session).turns == 2
            return first, again

    assert tokens(None, None) == tokens("random", "s") == tokens("right", "s")


def states():
    tables, tokens = tagged((), snapshots=2)
    row = tables.cache.states.reserve()
    tables.keep_state(tokens, (), row)
    assert tables.cache.states.num_kept == 1
    tables.cache.sessions.end("s")
    tables.cache.evict(8)
    assert tables.cache.states.num_kept == 0 == tables.cache.num_pages


def preemption():
    with fake_engine(num_pages=24, max_running_requests=4) as engine:
        prompts = [[number, *PROMPT] for number in range(4)]
        alone = [engine.generate(prompt, params(max_tokens=24))[0].token_ids for prompt in prompts]
        found = engine.generate(prompts, params(max_tokens=24), session=["a", "b", "a", None])
        assert engine.stats().preemptions > 0
        assert [one.token_ids for one in found] == alone
        assert (engine.session_state("a").turns, engine.session_state("a").running) == (2, 0)
        assert all_pages_are_back(engine)
        assert engine.session_state("a").kept_tokens == 0


def branches():
    with fake_engine() as engine:
        several = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=8, ignore_eos=True)
        engine.generate(PROMPT, several, session="s")
        state = engine.session_state("s")
        assert (state.turns, state.running) == (3, 0)
        assert len(PROMPT) <= state.kept_tokens <= len(PROMPT) + 8
        assert all_pages_are_back(engine)


def ranks():
    scheduler = DataParallelScheduler(scheduler_config(), 2)
    for name in "ab":
        scheduler.add(Request(request_id=name, prompt_token_ids=PROMPT, params=params(), session_tag=SessionTag("s")))
    assert [len(cache.sessions) for cache in scheduler.caches] == [1, 1]
    assert scheduler.session_state("s").running == 2 and scheduler.end_session("s")


def no_cache():
    with fake_engine(enable_prefix_cache=False) as engine:
        assert engine.generate(PROMPT, params(), session="s")[0].num_cached_tokens == 0
        assert engine.session_state("s") is None and not engine.end_session("s")


CHECKS: dict[str, Callable[[], None]] = {
    "adapters, salts, images": salts,
    "speculation, grammars": speculates,
    "states of recurrent layers": states,
    "preemption": preemption,
    "several answers (`n`)": branches,
    "experts over ranks": ranks,
    "`enable_prefix_cache: false`": no_cache,
}
ELSEWHERE = ("a [tier](tiers.md)", "[several models](many-models.md)")  # what does not hold, and the server's paths


def test_the_table_has_these_rows():
    table = PAGE.read_text(encoding="utf-8").partition("### Features")[2].partition("\n## ")[0]
    names = re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE)
    assert names[2:] == [*list(CHECKS)[:6], *ELSEWHERE, list(CHECKS)[6]]


@pytest.mark.parametrize("feature", CHECKS)
def test_a_feature_works_as_its_row_says(feature):
    CHECKS[feature]()
