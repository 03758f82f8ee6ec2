"""The rules that choose a request's engine: the server's own, and those that other routers have."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import count
from typing import Protocol
from zlib import crc32

from mllm_compile.server.replicas.routing import Routing


class Rule(Protocol):
    """Chooses engines by number."""

    def begin(self, blocks: list[int], session: str) -> int:
        """The engine of a request, which then has it."""

    def end(self, engine: int) -> None:
        """A request of an engine is over."""


class Served:
    """The router of `--replicas` itself.

    Args:
        names_sessions: clients name their session with each request.
    """

    def __init__(self, num_engines: int, kv_tokens: int, names_sessions: bool) -> None:
        self._names = [str(number) for number in range(num_engines)]
        self._routing = Routing(self._names)
        self._names_sessions = names_sessions
        self._serving: list[list[AbstractContextManager[None]]] = [[] for _ in self._names]
        for name in self._names:
            self._routing.started(name, kv_tokens)

    def begin(self, blocks: list[int], session: str) -> int:
        engine = int(self._routing.choose(self._names, blocks, session if self._names_sessions else None))
        serving = self._routing.serving(self._names[engine])
        serving.__enter__()
        self._serving[engine].append(serving)
        return engine

    def end(self, engine: int) -> None:
        self._serving[engine].pop().__exit__(None, None, None)


class RoundRobin:
    """One engine after another."""

    def __init__(self, num_engines: int) -> None:
        self._turns, self._num_engines = count(), num_engines

    def begin(self, blocks: list[int], session: str) -> int:
        return next(self._turns) % self._num_engines

    def end(self, engine: int) -> None:
        pass


class LeastLoaded:
    """The engine with the fewest requests; of several the one that was chosen first."""

    def __init__(self, num_engines: int) -> None:
        self._loads, self._chosen, self._turns = [0] * num_engines, [0] * num_engines, count(1)

    def begin(self, blocks: list[int], session: str) -> int:
        engine = min(range(len(self._loads)), key=lambda number: (self._loads[number], self._chosen[number]))
        self._loads[engine] += 1
        self._chosen[engine] = next(self._turns)
        return engine

    def end(self, engine: int) -> None:
        self._loads[engine] -= 1


class SessionHash:
    """The engine that a session's name hashes to."""

    def __init__(self, num_engines: int) -> None:
        self._num_engines = num_engines

    def begin(self, blocks: list[int], session: str) -> int:
        return crc32(session.encode()) % self._num_engines

    def end(self, engine: int) -> None:
        pass


RULES = ("served", "served-unnamed", "session-hash", "least-loaded", "round-robin")


def rule_of(name: str, num_engines: int, kv_tokens: int) -> Rule:
    """The rule of a name of RULES.

    Args:
        kv_tokens: of an engine's pages.
    """
    if name.startswith("served"):
        return Served(num_engines, kv_tokens, names_sessions=name == "served")
    return {"session-hash": SessionHash, "least-loaded": LeastLoaded, "round-robin": RoundRobin}[name](num_engines)
