"""The contract of a pass: it rewrites a graph and counts its matches. The manager does everything else.

A pass rewrites `gm` in place and may add to `gm.meta` (keys below). It keeps `meta["val"]` (a fake tensor or SymInt) on
every node that it makes; match/nodes.py has helpers. pipeline.py times, lints, recompiles, dumps and verifies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.runtime.quantised.scheme import WeightScheme

# Keys of gm.meta that the compiler's driver fills for passes.
WEIGHT_SCHEMES = "weight_schemes"  # WeightSchemes; without it no weight is quantised
RANKS = "ranks"  # int: over how many ranks `shard` cuts the graph
EXPERT_RANKS = "expert_ranks"  # int: over how many ranks `spread_experts` deals experts
NUM_STAGES = "num_stages"  # int: into how many stages `stage` cuts the layers
CACHE_DTYPE = "cache_dtype"  # torch.dtype of the KV cache; without it the model's
LORA = "lora"  # LoraWish: which weights adapters may change; without it none
ANY_ROWS = "any_rows"  # bool: as PassTarget has it
HAS_AMX = "has_amx"  # bool: the CPU has AMX, by which libraries multiply bfloat16
CACHE_SCALES = "cache_scales"  # dict: weight name → CacheScales, of each weight of an attention that has some

# node.meta key of a placeholder, which the driver fills, too: no checkpoint holds its tensor, and it is not cut.
IS_CONSTANT = "is_constant"

# Keys of gm.meta that passes fill for the compiler's driver.
PACKED_WEIGHTS = "packed_weights"  # dict: packed weight name → tuple of PackedPart, in row order
ATTENTION_LAYERS = "attention_layers"  # list of LayerSpec, in layer order
CROSS_LAYERS = "cross_layers"  # likewise, of attention to an encoder's states
STATE_LAYERS = "state_layers"  # list of StateLayer, in layer order
PACKED_LAYERS = "packed_layers"  # list of PackedLayer, in layer order
WEIGHT_CUTS = "weight_cuts"  # dict: weight name → tuple of WeightCut, of each weight that ranks have parts of
QUANTISED_TENSORS = "quantised_tensors"  # dict: name of a weight input → QuantisedTensor
WEIGHT_FACTORS = "weight_factors"  # dict: weight name → WeightFactor, of each weight that is scaled while it is read
PANELS = "panels"  # dict: name of a weight input that lies in panels → bytes that stay together
LORA_LAYOUT = "lora_layout"  # LoraLayout: the weights that adapters change, and their buffers
VARIANTS = "variants"  # dict: piece → {most tokens: name of the submodule that is its variant for so many}

# node.meta key of the placeholders that a piece which writes KV itself has last: (which of CACHE_INPUTS, the layer's
# name, "" for the slots, which are every layer's).
CACHE_INPUT = "cache_input"
CACHE_INPUTS = ("slots", "keys", "values")

# node.meta key, of each node of a graph that is cut into stages, and of each step of its parent: which of them, an int.
STAGE = "stage"

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
        hopper_decode: our decode kernels for Hopper serve.
        counts_experts: runtime.expert_stats or runtime.routed_experts.
        num_ranks: runtime.tensor_parallel_size.
        num_expert_ranks: runtime.expert_parallel_size.
        num_stages: runtime.pipeline_parallel_size.
        dtype: the model's; kv_cache_dtype: the KV cache's; torch's names.
        attention_backend: runtime.attention_backend.
        deterministic: runtime.deterministic.
        any_rows: its steps may have any number of rows, whose numbers do not depend on it: a piece has no variants.
        split_decode: our decode kernels serve.
        has_panels: our C++ for linears is fast on this CPU.
        has_adapters: lora.max_adapters is not 0.
    """

    device_type: str
    compiles_pieces: bool
    compiles_cuda: bool
    hopper_decode: bool
    dtype: str
    kv_cache_dtype: str
    counts_experts: bool = False
    num_ranks: int = 1
    num_expert_ranks: int = 1
    num_stages: int = 1
    attention_backend: str = "torch"
    deterministic: bool = False
    any_rows: bool = False
    split_decode: bool = True
    has_panels: bool = False
    has_adapters: bool = False


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


NO_VARIANTS = "with runtime.deterministic a number does not depend on how many tokens a step has"
NO_CUDA_COMPILER = "CUDA C++ for Hopper cannot be compiled here: it takes such a GPU, and NVRTC"


@dataclass(frozen=True)
class PackedPart:
    """One parameter inside a packed weight: its rows are at [start, start + rows) of dimension 0."""

    weight_name: str
    start: int
    rows: int


@dataclass(frozen=True)
class WeightCut:
    """A dimension of a weight, and of each rank the ranges (start, length) of it that it has, in order."""

    dim: int
    ranges: tuple[tuple[tuple[int, int], ...], ...]

    def as_linear(self, is_transposed: bool) -> WeightCut:
        """The cut of experts' [E, N, K] where this is of [E, K, N]."""
        return replace(self, dim=3 - self.dim) if is_transposed and self.dim else self

    def part(self, tensor: Any, rank: int) -> Any:
        """The rank's part of a tensor, or of what describes one (checkpoint/planned_tensor.py)."""
        parts = [tensor.narrow(self.dim, start, length) for start, length in self.ranges[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


def part_of_rank(tensor: Any, cuts: tuple[WeightCut, ...], rank: int) -> Any:
    """The part of a weight that `rank` has."""
    for cut in cuts:
        tensor = cut.part(tensor, rank)
    return tensor


@dataclass(frozen=True)
class LoraWish:
    """The names of weights that adapters may change; and how many adapters memory is for, each up to this rank.

    Attributes:
        embedding: the embedding's weight.
        has_scales: adapters may scale the outputs of linears.
        tied_head: the head's own name, where its weight is the embedding's: adapters change them apart.
    """

    weights: frozenset[str]
    num_slots: int
    max_rank: int
    embedding: str = ""
    tied_head: str = ""
    has_scales: bool = False


@dataclass(frozen=True)
class CacheScales:
    """The names of a checkpoint's scales of an attention's keys and values; None where it has none."""

    keys: str | None
    values: str | None


@dataclass(frozen=True)
class WeightFactor:
    """The scale of a checkpoint, by its name, that a weight is multiplied with, or divided by."""

    scale: str
    is_divided: bool


@dataclass(frozen=True)
class WeightSchemes:
    """The weights that may be in memory in few bits.

    Attributes:
        schemes: by the weight's name.
        transposed: likewise, of weights that may be experts' [E, K, N]: the schemes of [E, N, K].
        are_chosen: the checkpoint has them plain, and they are quantised while they are read: then heads and routers,
            whose errors choose tokens and experts, keep their numbers; of int8 a head does not.
        takes_head: a head is quantised none the less.
        head: the head's weight by its own name, where it is the embedding by another; "" where it is not tied.
        in_panels: linears compute with them as they are, in panels (pack_linears).
        rounds_inputs: in panels, of inputs that are rounded to eight bits.
    """

    schemes: Mapping[str, WeightScheme]
    transposed: Mapping[str, WeightScheme] = field(default_factory=dict)
    are_chosen: bool = False
    takes_head: bool = False
    head: str = ""
    in_panels: bool = False
    rounds_inputs: bool = False


@dataclass(frozen=True)
class QuantisedTensor:
    """One tensor of a quantised weight, or of a rank's part of one.

    Attributes:
        shape: the weight's, as a linear has it: the last are its inputs.
        is_transposed: the model has the weight the other way round.
    """

    weight_name: str
    role: str
    scheme: WeightScheme
    shape: tuple[int, ...]
    is_transposed: bool = False

    def cut(self, cut: WeightCut) -> WeightCut:
        """How this tensor is cut where its weight is cut so: a matrix, or experts'."""
        cut = cut.as_linear(self.is_transposed)
        if cut.dim < len(self.shape) - 1:
            return cut
        ranges = (tuple(self.scheme.stretch(self.role, *one) for one in of_rank) for of_rank in cut.ranges)
        return WeightCut(cut.dim, tuple(ranges))
