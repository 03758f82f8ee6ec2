"""A model after the passes: what lowering gives, and what is checked and compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mllm_compile.kernels.piece import WrittenPiece
from mllm_compile.runtime.program.spec import Program

if TYPE_CHECKING:
    from torch import fx

    from mllm_compile.model.hf_model import HFModel
    from mllm_compile.passes.base import PackedPart, WeightCut
    from mllm_compile.passes.pipeline import PassReport


@dataclass(frozen=True)
class Lowered:
    """A model after the passes.

    Attributes:
        hf_model: the model that was traced.
        graph: the parent graph; its children are the pieces.
        program: the same as steps.
        reports: one a pass that has run.
        left_out: the passes that have not, each with the reason.
        symbols: the graph's size symbols → T, S, P, L.
        written_pieces: pieces of the program that are no part of the graph: attention of decodes, the choice of tokens,
            and the decode loop.
    """

    hf_model: HFModel
    graph: fx.GraphModule
    program: Program
    reports: list[PassReport]
    left_out: Mapping[str, str]
    symbols: dict[str, str]
    written_pieces: tuple[WrittenPiece, ...]

    @property
    def packed(self) -> dict[str, tuple[PackedPart, ...]]:
        from mllm_compile.passes.base import PACKED_WEIGHTS

        return self.graph.meta.get(PACKED_WEIGHTS, {})

    @property
    def num_ranks(self) -> int:
        from mllm_compile.passes.base import RANKS

        return self.graph.meta.get(RANKS, 1)

    @property
    def cuts(self) -> dict[str, tuple[WeightCut, ...]]:
        """How ranks' weights are cut out of the model's."""
        from mllm_compile.passes.base import WEIGHT_CUTS

        return self.graph.meta.get(WEIGHT_CUTS, {})

    @property
    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """The model's own shapes of its weights."""
        return {name: tuple(value.shape) for name, value in self.hf_model.model.state_dict(keep_vars=True).items()}
