"""Sessions bias which pages the prefix cache gives up, and change nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mllm_compile.runtime.schedule.pages import sessions
from mllm_compile.runtime.schedule.pages.sessions import SessionTag
from mllm_compile.runtime.schedule.pages.tables import PageTables

PAGE = 2


class Requests:
    """Requests one after another, over a prefix cache of few pages."""

    def __init__(self, num_pages=64) -> None:
        self.tables = PageTables(4, num_pages, num_pages, PAGE)
        self.cache = self.tables.cache
        self.sessions = self.cache.sessions

    def begin(self, row, token_ids, tag=None):
        tokens = np.array(token_ids, np.int64)
        session = None if tag is None else self.sessions.begin(tag)
        found = self.tables.attach_prefix(row, tokens[:-1], ())
        self.tables.grow(row, self.tables.pages_for(tokens.size) - found)
        return tokens, session, found, tag

    def end(self, row, begun):
        tokens, session, found, tag = begun
        if session is not None:
            self.sessions.over(session, tokens.size, found * PAGE)
        path = list(self.cache.path_of(self.tables.publish_and_release(row, tokens, tokens.size, ())))
        if self.sessions.are_used:
            starts = np.cumsum([0, *(run.pages.size for run in reversed(path))])[-2::-1]
            self.sessions.used(zip(path, (starts < found).tolist(), strict=True), session, tag)

    def ask(self, token_ids, tag=None):
        """A whole request; returns the tokens that it found."""
        begun = self.begin(0, token_ids, tag)
        self.end(0, begun)
        return begun[2] * PAGE

    def cached(self, token_ids):
        return self.cache.match_prefix(np.array(token_ids, np.int64))[1].size * PAGE

    def evict(self, num_tokens):
        self.tables.allocator.free(self.cache.evict(num_tokens // PAGE))


def one(name, **changes):
    return SessionTag(key=name, **changes)


def text(number, length=8):
    return [number * 100 + place for place in range(length)]


def test_an_ended_sessions_pages_go_first():
    requests = Requests()
    requests.ask(text(1), one("old"))
    requests.ask(text(2), one("ended"))
    requests.ask(text(3))
    assert requests.sessions.end("ended")
    requests.evict(8)
    assert [requests.cached(text(number)) for number in (1, 2, 3)] == [8, 0, 8]
    assert not requests.sessions.end("ended")
    requests.evict(8)
    assert [requests.cached(text(number)) for number in (1, 3)] == [0, 8]


def test_a_turn_leaves_what_it_does_not_go_on_from():
    requests = Requests()
    requests.ask(text(9))
    requests.ask([*text(1), *text(2)], one("s"))
    requests.ask([*text(1), *text(3)], one("s"))  # the history was compacted
    requests.evict(8)
    assert [requests.cached([*text(1), *text(number)]) for number in (2, 3)] == [8, 16]
    assert requests.cached(text(9)) == 8


@pytest.mark.parametrize("keeps", ["a prompt_cache_key", "a turn beside it"])
def test_branches_of_a_session_are_not_taken_for_old_ones(keeps):
    requests = Requests()
    tag = one("s", is_one_line=keeps != "a prompt_cache_key")
    requests.ask(text(9))
    beside = requests.begin(1, text(8), tag) if keeps == "a turn beside it" else None
    requests.ask([*text(1), *text(2)], tag)
    requests.ask([*text(1), *text(3)], tag)
    requests.evict(8)
    assert requests.cached(text(9)) == 0, "the least recently used"
    assert requests.cached([*text(1), *text(2)]) == 16
    if beside is not None:
        requests.end(1, beside)


@pytest.mark.parametrize("other", [None, one("other")])
def test_what_others_use_too_is_not_given_up_with_a_session(other):
    requests = Requests()
    requests.ask([*text(1), *text(2)], one("s"))
    requests.ask([*text(1), *text(3)], other)
    requests.ask(text(4))
    requests.sessions.end("s")
    requests.evict(8)
    assert requests.cached([*text(1), *text(2)]) == 8
    assert requests.cached([*text(1), *text(3)]) == 16


def test_what_was_there_before_a_session_stays_behind_it():
    requests = Requests()
    requests.ask(text(1))
    requests.ask([*text(1), *text(2)], one("s"))
    requests.sessions.end("s")
    requests.evict(8)
    assert requests.cached([*text(1), *text(2)]) == 8


def test_retained_pages_go_last_and_are_not_pinned():
    requests = Requests()
    requests.ask(text(1), SessionTag(retain_s=300))
    requests.ask(text(2))
    requests.evict(8)
    assert (requests.cached(text(1)), requests.cached(text(2))) == (8, 0)
    requests.evict(8)
    assert requests.cached(text(1)) == 0 == requests.cache.num_pages


def test_a_hit_begins_the_time_of_retention_anew(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    requests = Requests()
    requests.ask(text(1), SessionTag(retain_s=300))
    now[0] += 200
    requests.ask(text(1))
    requests.ask(text(2))
    now[0] += 200
    requests.evict(8)
    assert (requests.cached(text(1)), requests.cached(text(2))) == (8, 0)
    requests.ask(text(3))
    now[0] += 200
    requests.evict(8)
    assert (requests.cached(text(1)), requests.cached(text(3))) == (0, 8), "its time is over"


def test_a_session_that_ends_while_it_is_answered_keeps_nothing():
    requests = Requests()
    begun = requests.begin(1, text(1), one("s"))
    requests.ask(text(2))
    requests.sessions.end("s")
    requests.end(1, begun)
    requests.evict(8)
    assert (requests.cached(text(1)), requests.cached(text(2))) == (0, 8)


def test_its_state_counts_turns_and_hits():
    requests = Requests()
    requests.ask(text(1), one("s"))
    requests.ask([*text(1), *text(2)], one("s"))
    state = requests.sessions.state("s")
    assert state[:5] == (0, 2, 24, 8, 16)
    assert requests.sessions.state("other") is None


def test_sessions_are_bounded_and_forgetting_one_ends_nothing(monkeypatch):
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 3)
    requests = Requests()
    requests.ask(text(9))
    for number in range(1, 6):
        requests.ask(text(number), one(number))
    assert len(requests.sessions) == 3
    requests.evict(8)
    assert [requests.cached(text(number)) for number in (9, 1, 2)] == [0, 8, 8]
    assert requests.ask(text(1), one(1)) == 6, "it begins again"


ACTS = st.one_of(
    st.tuples(
        st.just("begin"),
        st.integers(0, 3),
        st.lists(st.integers(1, 3), min_size=1, max_size=12),
        st.one_of(
            st.none(),
            st.builds(
                SessionTag,
                key=st.sampled_from([None, "a", "b"]),
                retain_s=st.sampled_from([0, 300, 3600]),
                is_one_line=st.booleans(),
            ),
        ),
    ),
    st.tuples(st.just("end"), st.integers(0, 3)),
    st.tuples(st.just("over"), st.sampled_from("ab")),
    st.tuples(st.just("evict"), st.integers(1, 20)),
    st.tuples(st.just("forget"), st.lists(st.integers(1, 3), min_size=2, max_size=4)),
    st.tuples(st.just("flush")),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(ACTS, max_size=40))
def test_no_history_of_sessions_loses_a_page_or_a_lock(acts):
    requests, begun = Requests(40), {}
    for act, *what in acts:
        if act == "begin" and what[0] not in begun:
            begun[what[0]] = requests.begin(*what)
        elif act == "end" and what[0] in begun:
            requests.end(what[0], begun.pop(what[0]))
        elif act == "over":
            requests.sessions.end(*what)
        elif act == "evict":
            requests.evict(what[0] * PAGE)
        elif act == "forget":
            requests.cache.forget(what[0])
        elif act == "flush":
            requests.tables.flush_cache()
        unlocked = list(requests.cache._unlocked)
        assert len(unlocked) == len(set(unlocked)) and all(run.locks == 0 for run in unlocked)
        assert sum(run.pages.size for run in unlocked) == requests.cache.evictable_pages
        for session in requests.sessions._sessions.values():
            assert all(session in run.tag.sessions and run.pages.size for run in session.runs)
    for row, one_of_them in begun.items():
        requests.end(row, one_of_them)
    requests.tables.flush_cache()
    assert requests.tables.allocator.available_pages == 39
    assert not any(session.runs for session in requests.sessions._sessions.values())
