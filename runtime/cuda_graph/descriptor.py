"""The key under which a graph is captured and found. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchDescriptor:
    """The padded shape of a batch."""

    num_tokens: int  # padded
    num_reqs: int | None = None  # padded; None: any number, for PIECEWISE, and for FULL of any step
    uniform: bool = False  # every request has the same query length
    has_lora: bool = False
    num_active_loras: int = 0
