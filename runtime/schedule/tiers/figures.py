"""The figures of tiers. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierFigures:
    """One tier, at one moment; all but the first two count from the start.

    Attributes:
        name: host or disk.
        pages: pages that it holds.
        capacity: pages that it can hold.
        states: states of prefixes that it holds.
        hit_tokens: tokens of prompts that came from it.
        loaded_bytes, stored_bytes: what was copied from it, and to it.
        load_seconds, store_seconds: how long copies took, one after the other.
        evictions: pages and states that were given up for others.
        failed_loads: pages and states that did not arrive, and were computed.
    """

    name: str
    pages: int
    capacity: int
    states: int = 0
    hit_tokens: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    load_seconds: float = 0.0
    store_seconds: float = 0.0
    evictions: int = 0
    failed_loads: int = 0
