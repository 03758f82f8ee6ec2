"""Copies between the KV cache and a tier, as the scheduler asks for them and hears of their end. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from mllm_compile.runtime.sampling.transfer_params import KVTransferParams
from mllm_compile.runtime.schedule.tiers.index import Entry

_NO_FLAGS = np.empty(0, dtype=bool)
_NO_FLAGS.setflags(write=False)
_NO_PAGES = np.empty(0, dtype=np.int32)
_NO_PAGES.setflags(write=False)


@dataclass(slots=True, eq=False)
class Ticket:
    """One copy.

    Attributes:
        kind: load: from the tier to the KV cache; store: back; write: from the tier to the one below; read: back,
            ahead of a load on all ranks; lookup: no copy, the tier below tells what it has.
        entries: the tier's; of a store they are in the index when it is over.
        pages: [n] int32, of the KV cache; of states rows of GDNPool; none of a write or a lookup.
        is_state: states are copied, and no pages.
        from_below: [n] bool, of a load: what the tier below has. It is read into the slot first.
        failed: [n] bool, of one that is over: what did not arrive, or is not there.
        source: of a lookup, the engine that is asked; None: the tier below is no engine.
        seconds: how long it took.
        is_over: True at its end.
    """

    kind: Literal["load", "store", "write", "read", "lookup"]
    entries: list[Entry]
    pages: np.ndarray = field(default_factory=lambda: _NO_PAGES)
    is_state: bool = False
    from_below: np.ndarray = field(default_factory=lambda: _NO_FLAGS)
    failed: np.ndarray = field(default_factory=lambda: _NO_FLAGS)
    source: KVTransferParams | None = None
    seconds: float = 0.0
    is_over: bool = False

    @property
    def is_load(self) -> bool:
        return self.kind == "load"

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

    @property
    def takes_writes(self) -> bool:
        """The tier below may take more."""

    @property
    def outlives(self) -> bool:
        """Another process may find what the host's memory has."""

    @property
    def share_below(self) -> float:
        """The part of the tier below that is left to this engine."""

    def begin(self, ticket: Ticket) -> None:
        """Begins a copy behind all that was launched, without waiting for it."""

    def remove(self, entry: Entry, is_state: bool) -> None:
        """Begins to remove what the tier below has."""

    def void_kept(self) -> None:
        """Has no other process find what the host's memory has."""

    def clear_below(self) -> None:
        """Begins to remove all that it has of this model."""

    def finished(self) -> list[Ticket]:
        """The copies that are over since the last call."""

    def wait(self) -> None:
        """Waits until all copies are over."""

    def close(self) -> None:
        """Ends for good, when all copies are over."""
