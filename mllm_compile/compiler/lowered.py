"""A model before and after the passes: what is traced, and what lowering gives, which is checked and compiled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mllm_compile.kernels.piece import WrittenPiece
from mllm_compile.runtime.program.spec import Program

if TYPE_CHECKING:
    from torch import fx

    from mllm_compile.checkpoint.planned_tensor import PlannedTensor
    from mllm_compile.checkpoint.quantised import CheckpointTensors
    from mllm_compile.model.hf_model import HFModel
    from mllm_compile.model.sources.seen_images import SeenImagesAdapter
    from mllm_compile.model.towers.adapter import TowerAdapter
    from mllm_compile.passes.base import (
        CacheScales,
        PackedPart,
        QuantisedTensor,
        WeightCut,
        WeightFactor,
        WeightSchemes,
    )
    from mllm_compile.passes.pipeline import PassReport


_NAMED = 5


@dataclass(frozen=True)
class BuiltModel:
    """A model without its weights, and what is known of these.

    Attributes:
        hf_model: Transformers' model.
        table: model key → what of the checkpoint fills it; None for random weights.
        weight_schemes: the weights that may be in memory in few bits.
        tensors: of the checkpoint; None for random weights.
        cache_scales: the checkpoint's for a KV cache in few bits, by weights beside them.
        names: the names of each parameter and buffer; several where it is tied. A trace may make equal ones the same.
    """

    hf_model: HFModel
    table: Mapping[str, PlannedTensor] | None
    weight_schemes: WeightSchemes
    tensors: CheckpointTensors | None = None
    cache_scales: Mapping[str, CacheScales] = field(default_factory=dict)
    names: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class Lowered:
    """A model after the passes.

    Attributes:
        built: the model that was traced.
        graph: the parent graph; its children are the pieces.
        program: the same as steps.
        reports: one a pass that has run.
        left_out: the passes that have not, each with the reason.
        symbols: the graph's size symbols → T, S, P, L.
        written_pieces: pieces of the program that are no part of the graph: attention of decodes, layers with a state,
            the choice of tokens, and the decode loop.
        of_media: what its programs for images and sounds were lowered from: the text with features, and the towers.
        adapters: of the towers, in their order.
        of_lora: what its programs for adapters were lowered from: the text, and the text with features.
        of_head: of a model that pools, what its head was lowered from, if it has one.
        of_source: of an encoder-decoder, what its program of sources was lowered from.
        of_images: of a model whose layers attend to images, what its programs for these were: the text with them, and
            the tower.
        seen_images: what such a model has.
    """

    built: BuiltModel
    graph: fx.GraphModule
    program: Program
    reports: list[PassReport]
    left_out: Mapping[str, str]
    symbols: dict[str, str]
    written_pieces: tuple[WrittenPiece, ...]
    of_media: tuple[Lowered, ...] = ()
    adapters: tuple[TowerAdapter, ...] = ()
    of_lora: tuple[Lowered, ...] = ()
    of_head: tuple[Lowered, ...] = ()
    of_source: tuple[Lowered, ...] = ()
    of_images: tuple[Lowered, ...] = ()
    seen_images: SeenImagesAdapter | None = None

    def without_images(self) -> Lowered:
        """The model for text alone."""
        lora = None if self.program.lora is None else replace(self.program.lora, with_features=None)
        program = replace(self.program, media=None, lora=lora, images=None)
        left = replace(self, program=program, of_media=(), of_lora=self.of_lora[:1], adapters=())
        return replace(left, of_images=(), seen_images=None)

    @property
    def every(self) -> tuple[Lowered, ...]:
        """The text's model, the towers, the models with adapters, of sources and of images, as Program.every."""
        return (self, *self.of_media, *self.of_lora, *self.of_head, *self.of_source, *self.of_images)

    @property
    def hf_model(self) -> HFModel:
        return self.built.hf_model

    @property
    def quantised(self) -> dict[str, QuantisedTensor]:
        """The tensors of quantised weights, before they were packed, by their names."""
        from mllm_compile.passes.base import QUANTISED_TENSORS

        tensors: dict[str, QuantisedTensor] = self.graph.meta.get(QUANTISED_TENSORS, {})
        return tensors

    @property
    def packed(self) -> dict[str, tuple[PackedPart, ...]]:
        from mllm_compile.passes.base import PACKED_WEIGHTS

        parts: dict[str, tuple[PackedPart, ...]] = self.graph.meta.get(PACKED_WEIGHTS, {})
        return parts

    @property
    def factors(self) -> dict[str, WeightFactor]:
        """The weights that are multiplied by a scale while they are read."""
        from mllm_compile.passes.base import WEIGHT_FACTORS

        factors: dict[str, WeightFactor] = self.graph.meta.get(WEIGHT_FACTORS, {})
        return factors

    def lines_on_scales(self) -> list[str]:
        """The lines on scales of the checkpoint that no weight has: which of them are applied, and which are not."""
        unused = () if self.built.tensors is None else self.built.tensors.unused
        applied = {one.scale for one in self.factors.values()}
        left_out = [name for name in unused if name not in applied]
        lines = []
        if applied:
            lines.append(
                f"{len(applied)} scales of the KV cache, such as {min(applied)!r}, are applied, each as the next power "
                "of two: the weights around attention have them"
            )
        if left_out:
            lines.append(
                f"{len(left_out)} scales of the checkpoint, such as {left_out[0]!r}, are not applied: activations are "
                "not quantised by them, and the KV cache is only where runtime.kv_cache_dtype is fp8_e4m3"
            )
        return lines

    @property
    def num_ranks(self) -> int:
        from mllm_compile.passes.base import EXPERT_RANKS, RANKS

        count: int = max(self.graph.meta.get(RANKS, 1), self.graph.meta.get(EXPERT_RANKS, 1))
        return count

    @property
    def cuts(self) -> dict[str, tuple[WeightCut, ...]]:
        """How ranks' weights are cut out of the model's."""
        from mllm_compile.passes.base import WEIGHT_CUTS

        cuts: dict[str, tuple[WeightCut, ...]] = self.graph.meta.get(WEIGHT_CUTS, {})
        return cuts

    def cuts_of(self, tensor: str) -> tuple[WeightCut, ...]:
        """How ranks' parts are cut out of a tensor, also one of a quantised weight."""
        quantised = self.quantised.get(tensor)
        if quantised is None:
            return self.cuts.get(tensor, ())
        return tuple(quantised.cut(cut) for cut in self.cuts.get(quantised.weight_name, ()))

    def cut_lines(self) -> list[str]:
        """The cut over ranks for people: how much of the weights a rank holds, and the largest that all hold whole."""
        if self.num_ranks == 1:
            return []
        names = [name for one in self.program.weights for name in self._members(one)]
        sizes = {name: math.prod(self.whole_shapes[name]) for name in names if name in self.whole_shapes}
        whole = sorted((name for name in sizes if name not in self.cuts), key=lambda name: -sizes[name])
        held = sum(size // (self.num_ranks if name in self.cuts else 1) for name, size in sizes.items())
        lines = [
            f"{len(self.cuts)} weights are cut over {self.num_ranks} ranks, each of which holds "
            f"{held / max(1, sum(sizes.values())):.0%} of the model"
        ]
        if whole:
            lines.append(f"whole on every rank: {len(whole)}, the largest of them {', '.join(whole[:_NAMED])}")
        return lines

    def _members(self, weight: str) -> tuple[str, ...]:
        return tuple(part.weight_name for part in self.packed[weight]) if weight in self.packed else (weight,)

    @property
    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """The model's own shapes of its weights."""
        return {name: tuple(value.shape) for name, value in self.hf_model.model.state_dict(keep_vars=True).items()}
