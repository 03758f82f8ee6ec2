"""An engine of many: work that flows at the measured speeds, where the real one takes steps.

The rules are the scheduler's. Prompts get nine tenths of the time beside decodes. The first one that is begun shares
its part by halves with the shortest that has less left. A request is begun where there is room for all of it, its
answer included, so none is preempted. A prompt waits for half a step of the decodes beside it.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.fleet.conversation import Conversation
from benchmarks.fleet.engine import MAX_RUNNING, PAGE, Told
from benchmarks.fleet.kept_messages import KeptMessages
from benchmarks.fleet.step_costs import StepCosts
from mllm_compile.errors import RequestError
from mllm_compile.runtime.schedule.pace import TENFOLD
from mllm_compile.runtime.schedule.step_cost import StepLoad, pairs_of

_LEAST_MS = 1e-6  # what is left of rounding


@dataclass(slots=True, eq=False)
class _Asked:
    """A call.

    Attributes:
        size: tokens of its prompt.
        rest: of those, how many are not cached.
        cached: how many of the prompt were.
        held: tokens that are reserved for it.
        in_use: messages that the cache keeps for it.
        whole_ms, left_ms: of its prompt's work.
    """

    call: Any
    messages: Conversation
    begun_s: float
    size: int
    rest: int = 0
    cached: int = 0
    held: int = 0
    in_use: int = 0
    whole_ms: float = 0.0
    left_ms: float = 0.0

    @property
    def left(self) -> float:
        """Tokens of its prompt that are not computed."""
        return self.rest * self.left_ms / self.whole_ms


class FlowEngine:
    """An Engine; see there.

    Args:
        kv_tokens: of its pages.
        fold: tokens that each of these stands for; they are divided by it here.
    """

    def __init__(self, costs: StepCosts, kv_tokens: int, fold: int) -> None:
        self._costs, self._fold = costs, fold
        self._page = max(1, PAGE // fold)
        self._room = kv_tokens // fold
        self._cache = KeptMessages(self._room)
        rows = np.interp(np.arange(MAX_RUNNING + 1), costs.batches, costs.base_ms)
        self._base_ms: list[float] = rows.tolist()
        self._waiting: deque[_Asked] = deque()
        self._begun: list[_Asked] = []
        self._served: list[tuple[_Asked, float]] = []  # prompts that are computed, with their parts of the time
        self._decodes: list[tuple[float, int, _Asked]] = []  # a heap, by what `_made` is at their ends
        self._made = 0.0  # tokens that a decode made since ever
        self._keys = 0.0  # tokens of all decodes
        self._token_ms = math.inf  # of a decode's token
        self._number = 0
        self._now_s = self.busy_s = 0.0
        self.next_s = math.inf

    def add(self, now_s: float, call: Any, messages: Conversation) -> None:
        """See Engine.

        Raises:
            RequestError: the call has more tokens than the cache has room for.
        """
        if messages.ends[-1] > self._room:
            raise RequestError(
                f"a prompt of {messages.ends[-2]} tokens and its answer of {messages.answer.size}, each for "
                f"{self._fold}: expected at most {self._room} together. Give more --kv-tokens."
            )
        self._flow_to(now_s)
        self._waiting.append(_Asked(call, messages, now_s, messages.ends[-2]))
        self._plan()

    def go_on(self, now_s: float) -> Told:
        """See Engine."""
        self._flow_to(now_s)
        told = Told([], [])
        for asked, _ in self._served:
            if asked.left_ms <= _LEAST_MS:
                self._prompt_over(asked)
                waited_s = self._step_ms / 2e3 if self._decodes else 0.0
                told.first.append((asked.call, now_s + waited_s - asked.begun_s))
                self._decode(asked)
        due = self._made + _LEAST_MS / self._token_ms
        while self._decodes and self._decodes[0][0] <= due:
            asked = heapq.heappop(self._decodes)[2]
            self._answer_over(asked)
            told.ended.append((asked.call, asked.cached))
        self._plan()
        return told

    # --- time passes --------------------------------------------------------------------------------------------------

    @property
    def _step_ms(self) -> float:
        return self._base_ms[len(self._decodes)] + self._keys * self._fold * self._costs.key_ms

    def _flow_to(self, now_s: float) -> None:
        ms, self._now_s = (now_s - self._now_s) * 1e3, now_s
        if self._served or self._decodes:
            self.busy_s += ms / 1e3
        for asked, part in self._served:
            asked.left_ms -= part * ms
        if self._decodes:
            made = ms / self._token_ms
            self._made += made
            self._keys += made * len(self._decodes)

    def _plan(self) -> None:
        """Chooses whose work flows from now on, and until when."""
        while self._waiting and not self._begun and self._begin(self._waiting[0], 0):
            self._waiting.popleft()
        self._served, num_decodes = [], len(self._decodes)
        part = 1 - 1 / TENFOLD if num_decodes else 1.0
        if self._begun:
            first, shorter = self._begun[0], self._shorter()
            self._served = [(first, part)] if shorter is None else [(first, part / 2), (shorter, part / 2)]
        next_ms = min((asked.left_ms / share for asked, share in self._served), default=math.inf)
        self._token_ms = math.inf
        if num_decodes:
            self._token_ms = self._fold * self._step_ms * (TENFOLD if self._served else 1.0)
            next_ms = min(next_ms, (self._decodes[0][0] - self._made) * self._token_ms)
        self.next_s = self._now_s + max(next_ms, 0.0) / 1e3

    def _shorter(self) -> _Asked | None:
        """The shortest prompt that has less left than the first one; of those that wait it is begun."""
        left = self._begun[0].left
        found = min(self._begun[1:], key=lambda asked: asked.left, default=None)
        if found is not None and found.left < left:
            left = found.left
        else:
            found = None
        waiting = min(self._waiting, key=lambda asked: asked.size, default=None)
        if waiting is None or waiting.size >= left:
            return found
        of_first = self._waiting[0].size if waiting is not self._waiting[0] else 0
        if not self._begin(waiting, of_first):
            return found
        self._waiting.remove(waiting)
        return waiting

    # --- a call's way -------------------------------------------------------------------------------------------------

    def _begin(self, asked: _Asked, set_aside: int) -> bool:
        """Begins a call; False: there is no room for it beside so many tokens that are set aside."""
        if len(self._begun) + len(self._decodes) >= MAX_RUNNING:
            return False
        cache, messages = self._cache, asked.messages
        keys = messages.keys[:-1]
        asked.in_use, found = cache.found(keys, messages.ends)
        asked.cached = min(found, asked.size - 1) // self._page * self._page
        asked.held = messages.ends[-1] - found
        if asked.in_use:
            cache.use(keys[asked.in_use - 1])
        if cache.available < asked.held + set_aside:
            if asked.in_use:
                cache.leave(keys[asked.in_use - 1])
            return False
        cache.reserve(asked.held)
        asked.rest = asked.size - asked.cached
        load = StepLoad(0, 0, asked.rest, pairs_of(asked.rest, asked.cached))
        asked.whole_ms = asked.left_ms = self._costs.prompts_ms(load, self._fold)
        self._begun.append(asked)
        self._begun.sort(key=lambda one: one.begun_s)
        return True

    def _prompt_over(self, asked: _Asked) -> None:
        self._begun.remove(asked)
        self._keep(asked, len(asked.messages.keys) - 1)

    def _decode(self, asked: _Asked) -> None:
        self._number += 1
        self._keys += asked.size
        heapq.heappush(self._decodes, (self._made + self._to_decode(asked), self._number, asked))

    def _answer_over(self, asked: _Asked) -> None:
        self._keys -= asked.size + self._to_decode(asked)
        self._keep(asked, len(asked.messages.keys))
        self._cache.free += asked.held
        self._cache.leave(asked.messages.keys[-1])

    def _to_decode(self, asked: _Asked) -> float:
        """Tokens of the answer behind the first one, which comes with the prompt."""
        return asked.messages.ends[-1] - asked.size - 1 / self._fold

    def _keep(self, asked: _Asked, count: int) -> None:
        """Keeps the first messages of a call, which are computed."""
        asked.held -= self._cache.put(asked.messages.keys[:count], asked.messages.ends, asked.in_use)
        asked.in_use = count
