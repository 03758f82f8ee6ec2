"""Agents' sessions over several engines, by a clock of events.

A call begins when those that it waits for are over and its pause has passed. A session begins when another has ended.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.fleet.conversation import EMPTY, Conversation, gone_on
from benchmarks.fleet.engine import Engine
from benchmarks.fleet.rules import Rule
from benchmarks.server.agent_trace import Call, Generator

_TOLD = 20


@dataclass
class Figures:
    """The figures of a run.

    Attributes:
        first_token_s: of each call, from its begin.
        prompt_tokens, cached_tokens: of all calls.
        busy_s: of each engine.
        clock_s: at the end; of several runs, of all together.
    """

    first_token_s: list[float] = field(default_factory=list)
    call_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    busy_s: list[float] = field(default_factory=list)
    clock_s: float = 0.0

    @classmethod
    def of_all(cls, runs: Sequence[Figures]) -> Figures:
        """The figures of several runs. The engine that was busiest in one stands beside the busiest ones of others."""
        both = cls()
        for run in runs:
            both.first_token_s += run.first_token_s
            both.call_s += run.call_s
            both.prompt_tokens += run.prompt_tokens
            both.cached_tokens += run.cached_tokens
            both.new_tokens += run.new_tokens
            both.clock_s += run.clock_s
        both.busy_s = [sum(each) for each in zip(*(sorted(run.busy_s) for run in runs), strict=True)]
        return both


class Simulation:
    """A run.

    Args:
        sessions: how many, and how many at once.
        told: of the sessions that are over, up to _TOLD times.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        rule: Rule,
        generator: Generator,
        sessions: int,
        at_once: int,
        told: Callable[[int, Figures], None],
    ) -> None:
        self._told, self._told_each, self._over = told, -(-sessions // _TOLD), 0
        self._engines, self._rule = engines, rule
        self._starts = _sessions(generator, sessions)
        self._at_once = at_once
        self._events: list[tuple[float, int, Any]] = []  # a call that begins, or the number of an engine that goes on
        self._number = 0
        self._now = 0.0
        self._expected = [math.inf] * len(engines)  # when each one's next event was
        self._calls: dict[str, Call] = {}
        self._waiting: dict[str, set[str]] = {}
        self._after: dict[str, list[str]] = defaultdict(list)
        self._live: dict[str, set[str]] = {}  # of a session and its subagents: calls that are not over
        self._conversations: dict[str, Conversation] = {}
        self._begun: dict[str, float] = {}  # when
        self.figures = Figures()

    def run(self) -> Figures:
        """All sessions to their ends."""
        for place in range(self._at_once):
            self._start_session(0.5 * place)
        while self._events:
            self._now, _, what = heapq.heappop(self._events)
            if isinstance(what, int):
                self._go_on(what)
            else:
                self._begin(what)
        return self._figures_now()

    def _figures_now(self) -> Figures:
        self.figures.clock_s = self._now
        self.figures.busy_s = [engine.busy_s for engine in self._engines]
        return self.figures

    def _push(self, when: float, what: Any) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, what))

    def _start_session(self, when: float) -> None:
        calls = next(self._starts, None)
        if calls is None:
            return
        self._live[calls[0]["session"]] = {call["id"] for call in calls}
        for call in calls:
            self._calls[call["id"]] = call
            self._waiting[call["id"]] = set(call["after"])
            for other in call["after"]:
                self._after[other].append(call["id"])
        self._push(when + calls[0]["pause_s"], calls[0]["id"])

    def _begin(self, name: str) -> None:
        call = self._calls[name]
        before = self._conversations.get(call["parent"] if call["fork"] else call["session"], EMPTY)
        messages = self._conversations[call["session"]] = gone_on(before, call)
        prompt = messages.prompt
        number = self._rule.begin(prompt, call["session"])
        self._begun[name] = self._now
        self.figures.prompt_tokens += prompt.size
        self.figures.new_tokens += messages.ids.size - prompt.size
        self._engines[number].add(self._now, name, messages)
        self._expect(number)

    def _expect(self, number: int) -> None:
        """Comes back when something happens in an engine."""
        next_s = self._engines[number].next_s
        if next_s < math.inf and next_s != self._expected[number]:
            self._push(next_s, number)
        self._expected[number] = next_s

    def _go_on(self, number: int) -> None:
        if self._expected[number] != self._now:
            return  # a call came meanwhile, and it is later
        self._expected[number] = math.inf
        told = self._engines[number].go_on(self._now)
        self._expect(number)
        self.figures.first_token_s += [seconds for _, seconds in told.first]
        for name, cached in told.ended:
            self._rule.end(number)
            self.figures.cached_tokens += cached
            self.figures.call_s.append(self._now - self._begun.pop(name))
            self._call_over(name)

    def _call_over(self, name: str) -> None:
        call = self._calls.pop(name)
        for other in self._after.pop(name, ()):
            waiting = self._waiting[other]
            waiting.discard(name)
            if not waiting:
                del self._waiting[other]
                self._push(self._now + self._calls[other]["pause_s"], other)
        root = call["session"].partition(".")[0]
        live = self._live[root]
        live.discard(name)
        if not live:
            del self._live[root]
            self._start_session(self._now)
            self._over += 1
            if self._over % self._told_each == 0:
                self._told(self._over, self._figures_now())
        if call["ends_session"]:
            self._conversations.pop(call["session"], None)


def _sessions(generator: Generator, count: int) -> Iterator[list[Call]]:
    """The calls of each session, made when it begins; their lengths are spread as Generator.sessions spreads them."""
    rng = generator.rng
    length, kind = (rng.permutation(count) + rng.random(count) for _ in range(2))
    for number, (one, other) in enumerate(zip((length / count).tolist(), (kind / count).tolist(), strict=True)):
        yield generator.session(f"s{number}", one, other)
