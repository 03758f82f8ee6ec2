"""A model before and after the passes: what is traced, and what lowering gives, which is checked and compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mllm_compile.kernels.piece import WrittenPiece
from mllm_compile.runtime.program.spec import Program

if TYPE_CHECKING:
    from torch import fx

    from mllm_compile.checkpoint.planned_tensor import PlannedTensor
    from mllm_compile.model.hf_model import HFModel
    from mllm_compile.passes.base import PackedPart, QuantisedTensor, SmallWeights
    from mllm_compile.passes.pipeline import PassReport


@dataclass(frozen=True)
class BuiltModel:
    """A model without its weights, and what is known of these.

    Attributes:
        hf_model: Transformers' model.
        table: model key → what of the checkpoint fills it; None for random weights.
        small: the weights that may lie in memory in few bits.
    """

    hf_model: HFModel
    table: Mapping[str, PlannedTensor] | None
    small: SmallWeights


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
        written_pieces: pieces of the program that are no part of the graph: attention of decodes, the choice of tokens,
            and the decode loop.
    """

    built: BuiltModel
    graph: fx.GraphModule
    program: Program
    reports: list[PassReport]
    left_out: Mapping[str, str]
    symbols: dict[str, str]
    written_pieces: tuple[WrittenPiece, ...]

    @property
    def hf_model(self) -> HFModel:
        return self.built.hf_model

    @property
    def quantised(self) -> dict[str, QuantisedTensor]:
        """The tensors of quantised weights, before they were packed, by their names."""
        from mllm_compile.passes.base import QUANTISED_TENSORS

        return self.graph.meta.get(QUANTISED_TENSORS, {})

    @property
    def packed(self) -> dict[str, tuple[PackedPart, ...]]:
        from mllm_compile.passes.base import PACKED_WEIGHTS

        return self.graph.meta.get(PACKED_WEIGHTS, {})
