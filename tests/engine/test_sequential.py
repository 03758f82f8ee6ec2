"""Windows of a long sound one after another: where the next begins, and what it is told."""

from __future__ import annotations

import numpy as np
import pytest

from mllm_compile.engine.speech.sequential import Part, Walk, parts_of
from tests.fake_speech import LOG_MEL

T = 100  # the first time


@pytest.mark.parametrize(
    ("ids", "parts", "ahead"),
    [
        ([T, 5, 6, T + 10, T + 10, 7], [Part([T, 5, 6, T + 10, T + 10], 0, 10)], 20),
        (
            [T, 5, T + 10, T + 12, 7, T + 20],
            [Part([T, 5, T + 10], 0, 10), Part([T + 12, 7, T + 20], 12, 20)],
            80,
        ),
        ([T, 5, T + 10], [Part([T, 5, T + 10], 0, 10)], 80),
        ([T, 5], [Part([T, 5], 0, 40)], 80),
        ([5, 6], [Part([5, 6], 0, 40)], 80),
        ([], [], 80),
        ([T, T, 5], [Part([T, T], 0, 0)], 80),
    ],
)
def test_the_next_window_begins_behind_the_last_whole_segment(ids: list[int], parts: list[Part], ahead: int) -> None:
    assert parts_of(ids, T, 80) == (parts, ahead)


def test_a_walk_ends_and_its_last_window_is_filled_up() -> None:
    walk = Walk(np.ones((2, 100), np.float32))
    assert walk.take([T, 5, T + 30, T + 30, 6], T, 80, 0.0) == [Part([T, 5, T + 30, T + 30], 0, 30)]
    assert (walk.frame, walk.seconds, walk.is_at_end) == (60, pytest.approx(0.6), False)
    window = walk.window(80)
    assert window[:, :40].all() and not window[:, 40:].any()
    assert walk.take([T, 6], T, 80, 0.0) == [Part([T, 6], 0, 20)]
    assert walk.is_at_end


def test_a_window_is_told_the_end_of_the_text_so_far_unless_it_was_guessed() -> None:
    walk = Walk(np.ones((2, 300), np.float32), most_earlier=4, earlier=[[1, 2]])
    assert walk.told(T) == [1, 2]
    walk.take([T, 5, T + 30, T + 30, 6], T, 80, 0.0)
    assert walk.told(T) == [2, T, 5, T + 30]
    walk.take([T, 6], T, 80, 0.6)
    assert walk.told(T) == []
    walk.take([T, 7], T, 80, 0.2)
    assert walk.told(T) == [T, 6, T, 7]


def test_a_long_prompt_is_kept_as_far_as_it_is_told() -> None:
    walk = Walk.of(np.ones(LOG_MEL.samples, np.float32), LOG_MEL, list(range(1, 10_001)), 4)
    assert walk.earlier == [[9_997, 9_998, 9_999, 10_000]]
