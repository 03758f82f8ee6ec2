"""Copies between the KV cache and a tier, as the scheduler asks for them and hears of their end. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from mllm_compile.runtime.schedule.tiers.index import Entry

_NO_FLAGS = np.empty(0, dtype=bool)
_NO_FLAGS.setflags(write=False)


@dataclass(slots=True, eq=False)
class Ticket:
    """One copy.

    Attributes:
        is_load: from the tier to the KV cache.
        entries: the tier's; of a store they are in the index when it is over.
        pages: [n] int32, of the KV cache; of states rows of GDNPool.
        is_state: states are copied, and no pages.
        from_below: [n] bool, of a load: what the tier below has. It is read into the slot first.
        is_write: of no load: from the tier to the tier below, which has no pages.
        failed: [n] bool, of a copy that is over: what did not arrive.
        seconds: how long it took.
    """

    is_load: bool
    entries: list[Entry]
    pages: np.ndarray
    is_state: bool = False
    from_below: np.ndarray = field(default_factory=lambda: _NO_FLAGS)
    is_write: bool = False
    failed: np.ndarray = field(default_factory=lambda: _NO_FLAGS)
    seconds: float = 0.0

    @property
    def slots(self) -> np.ndarray:
        """[n] int64: where the entries are."""
        return np.array([entry.slot for entry in self.entries], dtype=np.int64)


class TierCopies(Protocol):
    """Copies beside the steps; used by the engine's thread. runtime/tiers/copies.py has the real one."""

    wake: Callable[[], None]
    """Called when a copy is over, from any thread."""
    page_bytes: int
    """Bytes of a page in all layers."""
    state_bytes: int
    """Bytes of a request's states."""

    def begin(self, ticket: Ticket) -> None:
        """Begins a copy behind all that was launched, without waiting for it."""

    def remove(self, entry: Entry, is_state: bool) -> None:
        """Begins to remove what the tier below has."""

    def finished(self) -> list[Ticket]:
        """The copies that are over since the last call."""

    def wait(self) -> None:
        """Waits until all copies are over."""

    def close(self) -> None:
        """Ends for good, when all copies are over."""
