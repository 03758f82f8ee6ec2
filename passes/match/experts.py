"""Recognises the linears of experts, and the weighted sum of each token's."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mllm_compile.passes.match import nodes
from mllm_compile.passes.match.nodes import is_call, is_op
from mllm_compile.runtime.ops.experts.shapes import MOST_CHOSEN


@dataclass(frozen=True)
class ExpertLinear:
    """Each row times the weight of its expert.

    Attributes:
        x: the rows; of tokens, if `of_tokens`.
        ids: the experts.
        weight: [E, N, K], or [E, K, N] if `is_transposed`; the values of a quantised one.
        bias: or None.
        scales, zeros, kind, group: of a quantised weight; scales None: it is a plain one.
    """

    x: Any
    ids: Any
    weight: Any
    bias: Any
    is_transposed: bool
    of_tokens: bool
    scales: Any = None
    zeros: Any = None
    kind: str = ""
    group: int = 0

    @property
    def num_experts(self) -> int:
        return int(self.weight.meta["val"].shape[0])

    @property
    def num_chosen(self) -> int:
        return int(self.ids.meta["val"].shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of an expert's weight."""
        rows = self.weight.meta["val"].shape[2 if self.is_transposed else 1]
        return int(rows), int(self.x.meta["val"].shape[1])


def match_expert_linear(node: object) -> ExpertLinear | None:
    """The operands of a call of any such op, which have them all by place; the kind of a weight in panels is ""."""
    if is_op(node, "expert_linear"):
        return ExpertLinear(*node.args)  # type: ignore[arg-type]
    if is_op(node, "quantised_expert_linear"):
        x, ids, values, scales, zeros, bias, kind, group, of_tokens = node.args
        return ExpertLinear(x, ids, values, bias, False, of_tokens, scales, zeros, kind, group)  # type: ignore[arg-type]
    if is_op(node, "integer_panel_expert_linear", "rounded_panel_expert_linear"):
        x, ids, values, scales, third, bias, group, of_tokens = node.args
        return ExpertLinear(x, ids, values, bias, False, of_tokens, scales, third, "", group)  # type: ignore[arg-type]
    return None


def match_weighted_sum(total: Any) -> tuple[Any, Any] | None:
    """Rows [T·k, N] and weights [T, k] of a sum over each token's rows."""
    if not is_call(total, torch.sum, "sum") or not _is_over_choices(total):
        return None
    view: Any = total.args[0]
    product: Any = view.args[0] if _is_reshaped(view) else None
    if not is_call(product, operator.mul) or len(view.users) != 1 or len(product.users) != 1:
        return None
    rows: Any
    column: Any
    rows, column = product.args
    if not isinstance(rows, fx.Node) or not _is_reshaped(column):
        return None
    weights: Any = column.args[0]
    val, of_weights = rows.meta["val"], weights.meta["val"]
    if val.dim() != 2 or of_weights.dim() != 2 or tuple(column.meta["val"].shape[1:]) != (1,):
        return None
    num_chosen = of_weights.shape[1]
    is_of_choices = tuple(view.meta["val"].shape[1:]) == (num_chosen, val.shape[1])
    is_small = isinstance(num_chosen, int) and num_chosen <= MOST_CHOSEN
    is_here = val.device.type == nodes.KERNEL_DEVICE_TYPE and of_weights.dtype in (val.dtype, torch.float32)
    return (rows, weights) if is_of_choices and is_small and is_here else None


def _is_reshaped(node: object) -> bool:
    return is_call(node, torch.reshape, "view")


def _is_over_choices(total: fx.Node) -> bool:
    """True for a sum over the second of three dimensions, which goes."""
    said: dict[str, Any] = dict(zip(("input", "dim", "keepdim", "dtype"), total.args, strict=False)) | total.kwargs
    is_plain = not said.get("keepdim") and said.get("dtype") is None
    return is_plain and said.get("dim") in (1, [1], (1,)) and total.meta["val"].dim() == 2
