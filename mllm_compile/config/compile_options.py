"""The options of a compile beyond the config. Free of torch, for the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CompileOptions:
    """
    Attributes:
        output: the runtime's folder; None: its place in the cache.
        pack_weights: put the weights into the runtime, in the program's own layout.
        verify_weights: hash the weights' data: compare it with what was remembered, or remember it.
    """

    output: Path | None = None
    pack_weights: bool = False
    verify_weights: bool = False
