"""Recognises the linear of a quantised weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import fx

from mllm_compile.passes.match.nodes import is_op


@dataclass(frozen=True)
class QuantisedLinear:
    """source · weightᵀ of a weight that is these tensors, and a bias where there is one.

    Of nvfp4 `zeros` are the factors of its rows.
    """

    source: fx.Node
    values: fx.Node
    scales: fx.Node
    zeros: fx.Node | None
    bias: fx.Node | None
    kind: str
    group: int

    @property
    def tensors(self) -> tuple[fx.Node, fx.Node, fx.Node | None]:
        """The weight's: values, scales and zero points."""
        return self.values, self.scales, self.zeros

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of the weight."""
        return int(self.values.meta["val"].shape[0]), int(self.source.meta["val"].shape[-1])


def match_quantised_linear(node: object) -> QuantisedLinear | None:
    """The operands of a call of the op, which has them all by place."""
    if not is_op(node, "quantised_linear"):
        return None
    return QuantisedLinear(*cast(Any, node.args))
