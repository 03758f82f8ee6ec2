"""Drafters guess what followed before, and remember a bounded text. Tests of steps show that answers stay the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from random import Random
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mllm_compile.runtime.config_sections import SpeculativeSection
from mllm_compile.runtime.speculation import past_answers, suffix
from mllm_compile.runtime.speculation.factory import make_speculation
from mllm_compile.runtime.speculation.history import ROOM, TokenHistory
from mllm_compile.runtime.speculation.ngram import NgramGuesser, distance_of_repeat
from mllm_compile.runtime.speculation.past_answers import END, PastAnswers, PastAnswersBySalt
from mllm_compile.runtime.speculation.suffix import SuffixGuesser
from tests.runtime.schedule.scheduler_simulation import make_request

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def ngram(prompt: Sequence[int], shortest: int = 2, longest: int = 4, most: int = 3) -> list[int]:
    return list(NgramGuesser(shortest, longest).begin(prompt, ()).propose(most))


def make_suffix(prompts: int = 10, factor: float = 1.0, share: float = 0.1) -> SuffixGuesser:
    return SuffixGuesser(24, prompts, factor, share)


def test_what_followed_the_newest_tokens_is_drafted():
    assert ngram([1, 2, 3, 4, 5, 9, 1, 2]) == [3, 4, 5]


def test_new_tokens_get_no_draft():
    assert ngram([1, 2, 3, 4]) == ngram([7]) == ngram([1, 5, 2, 5]) == []


def test_the_longest_match_comes_before_the_latest():
    assert ngram([1, 2, 3, 8, 8, 2, 3, 9, 9, 1, 2, 3], most=2) == [8, 8]
    assert ngram([1, 2, 3, 8, 8, 2, 3, 9, 9, 1, 2, 3], longest=2, most=2) == [9, 9], "of equals the latest"


def test_a_draft_goes_round_a_loop():
    assert ngram([6, 7, 6, 7, 6, 7], most=5) == [6, 7, 6, 7, 6]


@given(TEXTS, st.integers(1, 3), st.integers(0, 3))
def test_a_lookup_finds_what_a_search_by_hand_finds(text, shortest, more):
    longest, expected = shortest + more, 0
    for length in range(longest, shortest - 1, -1):
        ends = [end for end in range(length, len(text)) if text[end - length : end] == text[len(text) - length :]]
        if ends:
            expected = len(text) - ends[-1]
            break
    assert distance_of_repeat(np.array(text), shortest, longest) == expected


@given(st.lists(st.lists(st.integers(0, 99), max_size=30), max_size=99), st.integers(1, 50))
def test_a_history_keeps_the_newest_tokens_and_not_many_more(parts, most):
    history, text = TokenHistory([], most), []
    for part in parts:
        history.append(part)
        text += part
        kept = history.tokens.tolist()
        assert kept == text[len(text) - len(kept) :]
        assert min(most, len(text)) <= len(kept) <= 2 * most + ROOM + 2 * 30


def test_a_suffix_draft_follows_the_majority_and_ends_where_few_agree():
    text = [1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 6, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 9, 0, 7, 1, 2, 3]
    assert list(make_suffix(factor=4.0, share=0.6).begin(text, ()).propose(8)) == [4], "three of four places"
    assert list(make_suffix(factor=4.0, share=0.5).begin(text, ()).propose(3)) == [4, 5, 0], "two of four"


def test_a_suffix_draft_has_a_factor_of_what_agrees():
    text = [*range(20), 1, 2, 3]
    assert list(make_suffix().begin(text, ()).propose(8)) == [4, 5, 6]
    assert list(make_suffix(factor=0.4).begin(text, ()).propose(8)) == [4]


@pytest.mark.parametrize(("captured", "factor", "drafted"), [({}, None, 3), ({15: 9}, None, 12), ({15: 9}, 2.0, 6)])
def test_a_suffix_draft_is_longer_where_steps_take_as_long_for_fewer(captured, factor, drafted):
    section = SpeculativeSection(method="suffix", suffix_decoding_max_spec_factor=factor)
    drafter = make_speculation(section, 100, captured=captured).drafter
    assert len(drafter.guess(make_request("a", [*range(20), 1, 2, 3]), 15)) == drafted


def test_a_suffix_draft_goes_round_a_loop():
    answer = make_suffix(prompts=0).begin([9, 6, 7, 6, 7, 6], ())
    assert list(answer.propose(3)) == [7, 6, 7]
    answer.take([7, 6] * 12)
    assert list(answer.propose(9)) == [7, 6] * 4 + [7]


def test_two_tokens_of_the_request_are_looked_up_where_three_stand_nowhere():
    text = [1, 2, 3, 4, 5, 6, 2, 3, 8, 8, 8, 9, 7, 2, 3]
    assert list(make_suffix().begin(text, ()).propose(8)) == [8, 8], "the newest place, a token for each that agrees"
    past = make_suffix()
    other = past.begin([0], ())
    other.take([7, 2, 3, 0, 1])
    other.end()
    assert list(past.begin(text, ()).propose(8)) == [0, 1], "three of a past answer come first"


def test_past_answers_are_drafted_for_those_of_their_salt_alone():
    drafter = make_suffix()
    first = drafter.begin([1, 2], "a")
    first.take([30, 31, 32, 33, 34, 35])
    first.end()
    assert list(drafter.begin([9, 30, 31, 32], "a").propose(3)) == [33, 34, 35]
    assert list(drafter.begin([9, 30, 31, 32], "b").propose(3)) == []
    assert list(make_suffix(prompts=0).begin([9, 30, 31, 32], "a").propose(3)) == []


def test_a_past_answer_that_agrees_alone_is_gone_on_with_to_its_end_or_until_it_is_forgotten(monkeypatch):
    guesser, past_answer = make_suffix(), list(range(100, 160))
    of_salt = guesser._past.of("a")
    of_salt.add(past_answer)
    of_salt.ends_of([1, 2, 3])
    looked_up, ends_of = [], PastAnswers.ends_of
    monkeypatch.setattr(PastAnswers, "ends_of", lambda past, recent: looked_up.append(recent) or ends_of(past, recent))
    again, other = (guesser.begin([9], "a") for _ in range(2))
    for one in (again, other):
        one.take(past_answer[:24])
        assert one.propose(8) == past_answer[24:32]
        one.take(past_answer[24:33])
        assert one.propose(8) == past_answer[33:41]
    assert len(looked_up) == 2, "one for each"
    again.take(past_answer[33:58])
    assert again.propose(8) == past_answer[58:]
    again.take([*past_answer[58:], 7])
    assert again.propose(8) == []
    for _ in range(2 * 10):
        of_salt.add([1, 2])
    assert other.propose(8) == [], "it is forgotten"


@given(st.integers(0, 40), st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 9))
def test_a_draft_of_a_past_answer_is_what_a_search_finds(wrong_at, counts, most):
    text, guesser = list(range(100, 190)), make_suffix()
    past = guesser.begin([1], ())
    past.take(text)
    past.end()
    answer_ids = [*text[:wrong_at], 7, *text[wrong_at + 1 :]]
    answer, given_ids = guesser.begin([1], ()), []
    for count in counts:
        new = answer_ids[len(given_ids) :][:count]
        given_ids += new
        answer.take(new)
        assert list(answer.propose(most)) == list(guesser.begin([1, *given_ids], ()).propose(most))


def found_and_followed(tokens: np.ndarray, ends: list[int], recent: list[int], *limits: Any) -> tuple[int, list[int]]:
    length, places = suffix.longest(tokens, ends, np.array(recent))
    return length, suffix.follow(tokens, places, length, *limits)


def test_a_place_that_agrees_alone_is_gone_on_with_until_it_is_wrong(monkeypatch):
    own_ends, searches, text = suffix.own_ends, [], list(range(100, 160))
    monkeypatch.setattr(suffix, "own_ends", lambda tokens: searches.append(len(tokens)) or own_ends(tokens))
    guesser = make_suffix(prompts=0)
    answer = guesser.begin([*text, 9, 9], ())
    answer.take(text[: guesser.depth])
    assert answer.propose(8) == text[guesser.depth :][:8]
    answer.take(text[guesser.depth :][:9])
    assert answer.propose(8) == text[guesser.depth + 9 :][:8]
    assert len(searches) == 1, "the second draft needs none"
    answer.take([7, *text[3:8]])
    assert answer.propose(3) == text[8:11]
    assert len(searches) == 2, "and the wrong token ends that"


@given(st.integers(0, 40), st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 9))
def test_such_a_draft_is_what_a_search_finds(wrong_at, counts, most):
    """Each token of the text stands there once, but for one that the answer has wrong."""
    text, guesser = list(range(100, 190)), make_suffix(prompts=0)
    answer_ids = [*text[:wrong_at], 7, *text[wrong_at + 1 :]]
    answer, given_ids = guesser.begin(text, ()), []
    for count in counts:
        new = answer_ids[len(given_ids) :][:count]
        given_ids += new
        answer.take(new)
        assert list(answer.propose(most)) == list(guesser.begin(text + given_ids, ()).propose(most))


def test_a_draft_does_not_run_from_one_answer_into_the_next():
    past = PastAnswers(10)
    past.add([1, 2, 3, 4])
    past.add([5, 6, 7])
    assert past.ends_of([1, 2, 3]) == [3]
    assert found_and_followed(past.tokens, [3], [1, 2, 3], 9, 4.0, 0.1) == (3, [4])


@pytest.mark.parametrize("most", [1, 3])
def test_the_newest_past_answers_are_kept_and_not_twice_as_many(most):
    past = PastAnswers(most)
    for index in range(20):
        past.add([index, 100, 101, 102])
        assert past.num_tokens <= (2 * most + 1) * 5
        for kept in range(max(0, index - most + 1), index + 1):
            (end,) = past.ends_of([kept, 100, 101])
            assert past.tokens[end - 3 : end + 1].tolist() == [kept, 100, 101, 102], "among the newest"
    assert not past.ends_of([0, 100, 101])


@pytest.mark.parametrize("lengths", [[3000], [5, 900, 2, 700, 300]])
def test_a_long_answer_is_entered_in_parts_and_found_whole_in_the_end(monkeypatch, lengths):
    choose = Random(0)
    answers = [[choose.randrange(12) for _ in range(length)] for length in lengths]
    parts, whole = PastAnswers(100), PastAnswers(100)
    for answer in answers:
        before = parts._num_entered
        parts.add(answer)
        assert parts._num_entered - before <= past_answers.ENTERED_WITH_ANSWER
    monkeypatch.setattr(past_answers, "ENTERED_WITH_ANSWER", 10_000)
    for answer in answers:
        whole.add(answer)
    calls = 0
    while parts._num_entered < parts.num_tokens:
        before, calls = parts._num_entered, calls + 1
        parts.ends_of([1, 2, 3])
        assert 0 < parts._num_entered - before <= past_answers.ENTERED_WITH_DRAFT
    assert calls > 10
    assert parts._ends == whole._ends


def test_all_that_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(past_answers, "MOST_TOKENS", 100)
    monkeypatch.setattr(past_answers, "MOST_TOKENS_OF_ALL", 500)
    choose, every = Random(0), PastAnswersBySalt(1000)
    for salt in range(50):
        past = every.of(salt)
        for _ in range(20):
            past.add([choose.randrange(5) for _ in range(choose.randint(1, 200))])
            assert past.num_tokens <= 2 * 100 + 101
            assert all(len(ends) <= past_answers.MOST_PLACES for ends in past._ends.values())
        assert every._num_tokens() <= 500 + 400


@given(TEXTS)
def test_own_places_are_those_of_a_search_by_hand(text):
    """KEY tokens have to agree, or LEAST if no place has more."""
    ends: list[int] = []
    for length in (suffix.KEY, suffix.LEAST):
        ends = ends or [end for end in range(suffix.KEY, len(text)) if text[end - length : end] == text[-length:]]
    assert suffix.own_ends(np.array(text)).tolist() == ends[-suffix.MOST_PLACES :]


def followed(text: list[int], ends: list[int], recent: list[int], most: int, factor: float, share: float) -> Any:
    """Gives what suffix.follow does, place by place and token by token."""
    lengths, left = [], []
    for end in ends:
        length = 0
        while length < min(end, len(recent)) and text[end - 1 - length] == recent[-1 - length]:
            length += 1
        lengths.append(length)
        behind = (text[end:] * most)[:most]
        left.append(behind[: behind.index(END)] if END in behind else behind)
    left = [after for after, length in zip(left, lengths, strict=True) if length == max(lengths)]
    total, draft = len(left), []
    while left and len(draft) < min(most, int(factor * max(lengths))):
        nexts = [after[len(draft)] for after in left if len(after) > len(draft)]
        count = max(map(nexts.count, nexts), default=0)
        if not count or count < share * total:
            break
        token = next(token for token in reversed(nexts) if nexts.count(token) == count)
        left = [after for after in left if after[len(draft) : len(draft) + 1] == [token]]
        draft.append(token)
    return max(lengths), draft


@given(
    st.lists(st.integers(-1, 2), min_size=4, max_size=60),
    st.integers(3, 9),
    st.integers(1, 9),
    st.sampled_from([0.3, 1.0, 4.0]),
    st.sampled_from([0.0, 0.1, 0.5, 0.7, 1.0]),
)
def test_a_draft_is_that_of_a_majority_counted_by_hand(text, depth, most, factor, share):
    text.append(0)
    ends = suffix.own_ends(np.array(text)).tolist()
    if ends:
        limits = most, factor, share
        expected = followed(text, ends, text[-depth:], *limits)
        assert found_and_followed(np.array(text), ends, text[-depth:], *limits) == expected


def lines_of(call: Callable[[], object]) -> int:
    """Lines of Python that a call runs: a cost without a clock."""
    lines = 0

    def count(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


def test_a_draft_of_many_places_runs_few_lines_of_python():
    """Many places are compared at once: token by token they took thousands of lines, and 500 µs in place of 30."""
    choose = Random(0)
    guesser, repeated = make_suffix(), [choose.randrange(40_000) for _ in range(60)]
    for _ in range(16):
        answer = guesser.begin([1], ())
        answer.take([choose.randrange(40_000) for _ in range(50)] + repeated)
        answer.end()
    prompt = [choose.randrange(3_000) for _ in range(12_000)]
    for _ in range(16):
        prompt += repeated + [choose.randrange(3_000) for _ in range(200)]
    answer = guesser.begin(prompt, ())
    answer.take(repeated[:30])
    assert list(answer.propose(15)) == repeated[30:45]
    assert lines_of(lambda: answer.propose(15)) < 500


def test_a_config_without_a_method_drafts_nothing():
    assert make_speculation(SpeculativeSection(), 100) is None
    assert SpeculativeSection(num_speculative_tokens=5).most_drafted == 0
