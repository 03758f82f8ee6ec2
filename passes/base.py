"""The contract of a pass: it rewrites a graph and counts its matches. The manager does everything else.

A pass rewrites `gm` in place and may add to `gm.meta` (keys below). It keeps `meta["val"]` (a fake tensor or SymInt) on
every node that it makes; match/nodes.py has helpers. pipeline.py times, lints, recompiles, dumps and verifies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import fx

# Keys of gm.meta that passes fill for the compiler's driver.
PACKED_WEIGHTS = "packed_weights"  # dict: packed weight name → tuple of PackedPart, in row order
ATTENTION_LAYERS = "attention_layers"  # list of LayerSpec, in layer order
SMALL_FORMS = "small_forms"  # dict: piece → {most tokens: name of the submodule that is its form for so many}

# node.meta key of the placeholders that a piece which writes KV itself has last: (which of CACHE_INPUTS, the layer's
# name, "" for the slots, which are every layer's).
CACHE_INPUT = "cache_input"
CACHE_INPUTS = ("slots", "keys", "values")


# node.meta key of the value that the head starts from, where the rows that it works on have been gathered before.
HEAD_INPUT = "head_input"


@dataclass(frozen=True)
class PassResult:
    """The result of one pass."""

    gm: fx.GraphModule
    matches: int
    nodes_before: int
    nodes_after: int


class GraphPass(Protocol):
    """A rewriting of one FX graph. `name` is the file's name, the name in configs, in dumps and in tests."""

    name: ClassVar[str]

    def __call__(self, gm: fx.GraphModule) -> PassResult: ...


@dataclass(frozen=True)
class PackedPart:
    """One parameter inside a packed weight: its rows stand at [start, start + rows) of dimension 0."""

    weight_name: str
    start: int
    rows: int
