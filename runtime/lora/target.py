"""The places of adapters (LoRA) in a program: the weights that they change, and the buffers of their factors.

An adapter adds B · A · x to a linear's W · x. Factors of `num_slots` adapters are in memory at once, each padded to
`max_rank` with zeros. Linears that are packed into one have their A rows one part behind the other. An embedding's A
lies turned, a row for each token id; each expert of a layer has factors of its own. Free of torch.

Shape legend: N outputs, K inputs of a linear; r max_rank; P parts of it that adapters may change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Ranges = tuple[tuple[tuple[int, int], ...], ...]  # of each rank, (start, length) in order; () where it is not cut

TargetKind = Literal["linear", "head", "embedding", "experts"]

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class SourceRows:
    """Rows of a weight that are rows of a module of the checkpoint: [start, start + rows) of the weight are
    [source_start, source_start + rows) of the module's."""

    module: str
    start: int
    source_start: int
    rows: int


@dataclass(frozen=True)
class LoraTarget:
    """A weight [outputs, inputs] that adapters may change, and where its factors are.

    Attributes:
        weight: its name, of the model.
        linear: names the buffers a_name(linear) [slots, P * r, K] and b_name(linear) [slots, N', r].
        part: its index among the linear's parts: its A is at row part * r.
        start, rows: its rows of B', of a rank.
        output_ranges, input_ranges: the outputs and inputs that each rank has.
        sources: the checkpoint's modules that it is made of, where it is not one of its own name.
        stored_in, stored_start: the program's weight that it is in, and its first row there.
        kind: what reads the weight. The buffers of an embedding are [slots, K, r] and [slots, N, r], of experts
            [slots, E' * r, K] and [slots, E' * N', r], of a rank's experts.
        num_experts: E; 0 of others.
        expert_ranges: the experts that each rank has.
        siblings: the parameters of the experts' module, in its order.
    """

    weight: str
    outputs: int
    inputs: int
    linear: str
    part: int
    start: int
    rows: int
    output_ranges: Ranges = ()
    input_ranges: Ranges = ()
    sources: tuple[SourceRows, ...] = ()
    stored_in: str = ""
    stored_start: int = 0
    kind: TargetKind = "linear"
    num_experts: int = 0
    expert_ranges: Ranges = ()
    siblings: tuple[str, ...] = ()

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the factors of an adapter of this rank: A [r, K] and B [N, r], of experts [E, …]."""
        experts = (self.num_experts,) if self.kind == "experts" else ()
        return (*experts, rank, self.inputs), (*experts, self.outputs, rank)


@dataclass(frozen=True)
class LoraBuffers:
    """The buffers of one linear: A [slots, a_rows, inputs] and B [slots, b_rows, max_rank], of a rank.

    Where adapters may scale its outputs, also [slots, scales], one of each output. 0: they may not.
    """

    linear: str
    a_rows: int
    inputs: int
    b_rows: int
    scales: int = 0


@dataclass(frozen=True)
class LoraLayout:
    """All that adapters may change, and its memory.

    Attributes:
        dtype: of the factors, torch's name.
        unread: modules whose weights no text goes through, such as a tower of images.
    """

    num_slots: int
    max_rank: int
    dtype: str
    targets: tuple[LoraTarget, ...]
    buffers: tuple[LoraBuffers, ...]
    unread: tuple[str, ...] = ()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each buffer, by its name."""
        found: dict[str, tuple[int, ...]] = {}
        for one in self.buffers:
            found[a_name(one.linear)] = self.num_slots, one.a_rows, one.inputs
            found[b_name(one.linear)] = self.num_slots, one.b_rows, self.max_rank
            if one.scales:
                found[scales_name(one.linear)] = self.num_slots, one.scales
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(math.prod(shape) for shape in self.shapes().values()) * _BYTES[self.dtype]


def a_name(linear: str) -> str:
    """The program's name of a linear's A."""
    return f"lora_A.{linear}"


def b_name(linear: str) -> str:
    """The program's name of a linear's B."""
    return f"lora_B.{linear}"


def scales_name(linear: str) -> str:
    """The program's name of the scales of a linear's outputs."""
    return f"lora_scales.{linear}"
