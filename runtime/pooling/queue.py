"""The queue of texts that wait for a step: calls take turns by the tokens that they were given, so a long list holds up
no short one."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from mllm_compile.runtime.pooling.texts import PackedText


@dataclass(eq=False)
class Call:
    """The texts of one caller, which are answered together.

    Attributes:
        priority: lower is served first.
        waiting: numbers of texts that no step has taken.
        given: tokens that steps have taken of it, beside what it began with.
    """

    texts: list[PackedText]
    priority: int = 0
    waiting: deque[int] = field(default_factory=deque)
    given: int = 0

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.texts)))


class TextQueue:
    """The queue; for one thread.

    Args:
        most_tokens: of a step; a text alone may have more.
        most_texts: of a step.
    """

    def __init__(self, most_tokens: int, most_texts: int) -> None:
        self.most_tokens, self.most_texts = most_tokens, most_texts
        self._heap: list[tuple[int, int, int, Call]] = []
        self._number = 0
        self._least_given = 0  # of the call that was served last: a new one begins there

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, call: Call) -> None:
        call.given = self._least_given
        heapq.heappush(self._heap, self._entry(call))

    def _entry(self, call: Call) -> tuple[int, int, int, Call]:
        self._number += 1
        return call.priority, call.given, self._number, call

    def take(self) -> list[tuple[Call, int]]:
        """The texts of the next step: calls, and the numbers of their texts."""
        taken: list[tuple[Call, int]] = []
        tokens = 0
        while self._heap and len(taken) < self.most_texts:
            _, given, _, call = self._heap[0]
            if not call.waiting:  # it was withdrawn
                heapq.heappop(self._heap)
                continue
            length = len(call.texts[call.waiting[0]].ids)
            if taken and tokens + length > self.most_tokens:
                break
            taken.append((call, call.waiting.popleft()))
            tokens += length
            self._least_given = given
            call.given += length
            if call.waiting:
                heapq.heapreplace(self._heap, self._entry(call))
            else:
                heapq.heappop(self._heap)
        return taken
