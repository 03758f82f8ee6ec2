"""The queue of texts: a long list holds up no short one."""

from __future__ import annotations

import numpy as np

from mllm_compile.runtime.pooling.queue import Call, TextQueue
from mllm_compile.runtime.pooling.texts import PackedText, PoolingParams

PARAMS = PoolingParams("embed", ("mean",))


def _call(*lengths: int, priority: int = 0) -> Call:
    return Call([PackedText(np.zeros(length, np.int64), PARAMS) for length in lengths], priority)


def test_a_step_has_at_most_so_many_tokens_and_texts() -> None:
    queue = TextQueue(10, 3)
    queue.add(_call(4, 4, 4, 1, 1, 1, 1))
    assert [[number for _, number in queue.take()] for _ in range(3)] == [[0, 1], [2, 3, 4], [5, 6]]
    assert not queue.take() and not len(queue)


def test_a_text_longer_than_a_step_is_a_step_alone() -> None:
    queue = TextQueue(10, 3)
    queue.add(_call(30, 2))
    assert [len(queue.take()) for _ in range(2)] == [1, 1]


def test_calls_take_turns_by_their_tokens() -> None:
    queue = TextQueue(8, 8)
    long, short = _call(*[4] * 100), _call(4, 4)
    queue.add(long)
    queue.take()
    queue.add(short)
    turns = [call for _ in range(3) for call, _ in queue.take()]
    assert turns.count(short) == 2 and turns.index(short) <= 1


def test_a_lower_priority_is_first() -> None:
    queue = TextQueue(4, 8)
    later, urgent = _call(4, 4), _call(4, priority=-1)
    queue.add(later)
    queue.add(urgent)
    assert queue.take()[0][0] is urgent


def test_a_withdrawn_call_is_passed_over() -> None:
    queue = TextQueue(8, 8)
    gone, other = _call(4), _call(4)
    queue.add(gone)
    queue.add(other)
    gone.waiting.clear()
    assert [call for call, _ in queue.take()] == [other]
