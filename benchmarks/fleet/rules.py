"""The rules that choose a request's engine: the server's own, and those that other routers have."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import count
from typing import Protocol
from zlib import crc32

import numpy as np

from mllm_compile.server.replicas.routing import Routing
from mllm_compile.server.replicas.text import Text

# SplitMix64's constants.
_SPREAD, _LAST = np.uint64(0x9E3779B97F4A7C15), np.uint64(31)
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))


class Rule(Protocol):
    """Chooses engines by number."""

    def begin(self, prompt: np.ndarray, session: str) -> int:
        """The engine of a request, by its prompt's ids [n] int64; it then has it."""

    def end(self, engine: int) -> None:
        """A request of an engine is over."""


class Served:
    """The router of `--replicas` itself.

    Args:
        block: tokens of a block of its texts.
        names_sessions: clients name their session with each request.
    """

    def __init__(self, num_engines: int, kv_tokens: int, block: int, names_sessions: bool) -> None:
        self._block = block
        self._names = [str(number) for number in range(num_engines)]
        self._routing = Routing(self._names)
        self._names_sessions = names_sessions
        self._serving: list[list[AbstractContextManager[None]]] = [[] for _ in self._names]
        for name in self._names:
            self._routing.started(name, kv_tokens)

    def begin(self, prompt: np.ndarray, session: str) -> int:
        text, name = text_of(prompt, self._block), session if self._names_sessions else None
        engine = int(self._routing.choose(self._names, text, name))
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

    def begin(self, prompt: np.ndarray, session: str) -> int:
        return next(self._turns) % self._num_engines

    def end(self, engine: int) -> None:
        pass


class LeastLoaded:
    """The engine with the fewest requests; of several the one that was chosen first."""

    def __init__(self, num_engines: int) -> None:
        self._loads, self._chosen, self._turns = [0] * num_engines, [0] * num_engines, count(1)

    def begin(self, prompt: np.ndarray, session: str) -> int:
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

    def begin(self, prompt: np.ndarray, session: str) -> int:
        return crc32(session.encode()) % self._num_engines

    def end(self, engine: int) -> None:
        pass


RULES = ("served", "served-unnamed", "session-hash", "least-loaded", "round-robin")


def text_of(ids: np.ndarray, block: int) -> Text:
    """Ids [n] int64 as a router's text, with a hash of each `block` of them."""
    mixed = ids.astype(np.uint64) + np.arange(ids.size, dtype=np.uint64) * _SPREAD
    for shift, factor in _MIX:
        mixed = (mixed ^ (mixed >> shift)) * factor
    blocks = (mixed ^ (mixed >> _LAST)).cumsum()[block - 1 :: block].tolist()
    return Text(blocks, ids.tobytes(), block * ids.itemsize)


def rule_of(name: str, num_engines: int, kv_tokens: int, block: int) -> Rule:
    """The rule of a name of RULES.

    Args:
        kv_tokens: of an engine's pages.
        block: tokens of a block of a router's texts.
    """
    if name.startswith("served"):
        return Served(num_engines, kv_tokens, block, names_sessions=name == "served")
    return {"session-hash": SessionHash, "least-loaded": LeastLoaded, "round-robin": RoundRobin}[name](num_engines)
