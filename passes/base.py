"""The contract of a pass: it rewrites a graph and counts its matches. The manager does everything else.

A pass rewrites `gm` in place and may add to `gm.meta` (keys below). It keeps `meta["val"]` (a fake tensor or SymInt) on
every node that it makes; match/nodes.py has helpers. pipeline.py times, lints, recompiles, dumps and verifies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

# Keys of gm.meta that passes fill for the compiler's driver.
PACKED_WEIGHTS = "packed_weights"  # dict: packed weight name → tuple of PackedPart, in row order
ATTENTION_LAYERS = "attention_layers"  # list of LayerSpec, in layer order
STATE_LAYERS = "state_layers"  # list of StateLayer, in layer order
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


@dataclass(frozen=True)
class PassTarget:
    """Facts of a compile that decide which passes are of use.

    Attributes:
        device_type: "cuda" or "cpu".
        compiles_pieces: Inductor compiles them; if not, they run as traced, without kernels of ours.
        compiles_cuda: CUDA C++ for Hopper can be compiled here, and runs on the device.
        hopper_decode: compile.hopper_decode.
        counts_experts: runtime.expert_stats.
        dtype: the model's, and kv_cache_dtype that of the KV cache; torch's names.
    """

    device_type: str
    compiles_pieces: bool
    compiles_cuda: bool
    hopper_decode: bool
    dtype: str
    kv_cache_dtype: str
    counts_experts: bool = False


class GraphPass:
    """A rewriting of one FX graph.

    Attributes:
        name: the file's name; the name in configs, in dumps and in tests.
        needs: names of the ops of ours (runtime/ops) that it puts into graphs or looks for; all have kernels for CUDA.
            A compile leaves the pass out where pieces have no such kernels.
        is_required: the program cannot do without it; the others may be named in compile.disable_passes.
    """

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    is_required: ClassVar[bool] = False

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        """Why the pass is of no use for `target`, besides what `needs` says; None where it is of use."""
        return None

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        raise NotImplementedError


NO_CUDA_COMPILER = "CUDA C++ for Hopper cannot be compiled here: it takes such a GPU, and NVRTC"


@dataclass(frozen=True)
class PackedPart:
    """One parameter inside a packed weight: its rows stand at [start, start + rows) of dimension 0."""

    weight_name: str
    start: int
    rows: int
