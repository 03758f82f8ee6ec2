"""Agents' sessions over several engines, by a clock of events.

A call begins when those that it waits for are over and its pause has passed. A session begins when another has ended.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.fleet.engine import SimulatedEngine
from benchmarks.fleet.rules import Rule
from benchmarks.server.agent_trace import Call, Generator

_TOLD = 20
_ID_BITS = 24  # of a token's id those of its place in its message


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


@dataclass
class _Conversation:
    """The ids of a session's messages so far, and where each ends."""

    ids: np.ndarray
    ends: list[int]


class Simulation:
    """A run.

    Args:
        sessions: how many, and how many at once.
        told: of the sessions that are over, up to _TOLD times.
    """

    def __init__(
        self,
        engines: list[SimulatedEngine],
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
        self._events: list[tuple[float, int, Any]] = []  # a call that begins, or an engine whose step ends
        self._number = 0
        self._now = 0.0
        self._is_stepping = [False] * len(engines)
        self._step_ends = [0.0] * len(engines)
        self._calls: dict[str, Call] = {}
        self._waiting: dict[str, set[str]] = {}
        self._after: dict[str, list[str]] = defaultdict(list)
        self._live: dict[str, set[str]] = {}  # of a session and its subagents: calls that are not over
        self._conversations: dict[str, _Conversation] = {}
        self._begun: dict[str, tuple[float, float]] = {}  # when, and seconds that it does not wait
        self.figures = Figures()

    def run(self) -> Figures:
        """All sessions to their ends."""
        for place in range(self._at_once):
            self._start_session(0.5 * place)
        while self._events:
            self._now, _, what = heapq.heappop(self._events)
            if isinstance(what, int):
                self._step_over(what)
            else:
                self._begin(what)
        return self._figures_now()

    def _figures_now(self) -> Figures:
        self.figures.clock_s = self._now
        self.figures.busy_s = [engine.busy_ms / 1e3 for engine in self._engines]
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
        conversation = self._conversations.get(call["parent"] if call["fork"] else call["session"])
        kept = np.empty(0, np.int64)
        ends = [0]
        if conversation is not None and call["keep"]:
            ends = conversation.ends[: call["keep"] + 1]
            kept = conversation.ids[: ends[-1]]
        messages = [_ids_of(part["seed"], part["tokens"]) for part in call["append"]]
        answer = _ids_of(call["reply_seed"], call["out_tokens"])
        prompt = np.concatenate((kept, *messages))
        ends = [*ends, *(ends[-1] + np.cumsum([one.size for one in (*messages, answer)])).tolist()]
        self._conversations[call["session"]] = _Conversation(np.concatenate((prompt, answer)), ends)
        engine = self._rule.begin(prompt, call["session"])
        spared = 0.0
        if self._is_stepping[engine]:
            spared = self._engines[engine].not_waited_ms((self._step_ends[engine] - self._now) * 1e3) / 1e3
        self._begun[name] = (self._now, spared)
        self._engines[engine].add(name, prompt, answer)
        self.figures.prompt_tokens += prompt.size
        self.figures.new_tokens += answer.size
        if not self._is_stepping[engine]:
            self._step(engine)

    def _step(self, engine: int) -> None:
        ms = self._engines[engine].begin_step()
        self._is_stepping[engine] = ms is not None
        if ms is not None:
            self._step_ends[engine] = self._now + ms / 1e3
            self._push(self._step_ends[engine], engine)

    def _step_over(self, engine: int) -> None:
        first, ended = self._engines[engine].end_step()
        for name, early_ms in first:
            begun, spared = self._begun[name]
            self.figures.first_token_s.append(self._now - begun - spared - early_ms / 1e3)
        for name, cached in ended:
            self._rule.end(engine)
            self.figures.cached_tokens += cached
            self.figures.call_s.append(self._now - self._begun.pop(name)[0])
            self._call_over(name)
        self._step(engine)

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


def _ids_of(seed: int, tokens: int) -> np.ndarray:
    """Ids of a message that no other has; those of a chat template are left out, as they do not fold."""
    return (seed << _ID_BITS) + np.arange(tokens, dtype=np.int64)
