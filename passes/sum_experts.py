"""Makes the weighted sum of each token's experts one kernel, in pieces for many tokens."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import SMALL_FORMS, GraphPass, PassResult
from mllm_compile.passes.match import nodes
from mllm_compile.passes.match.nodes import is_call, replace_by_op, rewrite_pieces
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.experts.shapes import MOST_CHOSEN


class SumExperts(GraphPass):
    """Adds up experts' outputs by a kernel that reads each row as it lies.

    Why: behind the tiles' kernels Inductor's took 2.5 ms for 8192 tokens of 8 experts and 2048 outputs on an H200,
        where the bytes take 0.07.

    Before::

        y = (rows * reshape(w, (-1, 1))).view(T, k, -1).sum(1).to(rows.dtype)

    After::

        y = mllm.sum_experts(rows, w)

    Requires: deduplicated pieces on CUDA that have forms for fewer tokens: in those Inductor's sum takes 1.5 µs, with
        the residual.
    Preserves: products are rounded where the model rounds them, and are added in float32 as torch adds them.
    """

    name: ClassVar[str] = "sum_experts"
    needs: ClassVar[tuple[str, ...]] = ("sum_experts",)

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        matches = rewrite_pieces(gm, list(gm.meta.get(SMALL_FORMS, {})), _fuse)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _fuse(graph: fx.Graph, node: fx.Node) -> bool:
    operands = _weighted_sum(node)
    if operands is None:
        return False
    last = _rounded(node, operands[0].meta["val"].dtype)
    if last is None:
        return False
    replace_by_op(graph, last, op("sum_experts"), *operands)
    return True


def _weighted_sum(total: Any) -> tuple[Any, Any] | None:
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


def _rounded(total: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    """The node that gives the sum in this dtype: the sum itself, or what alone reads it."""
    if total.meta["val"].dtype == dtype:
        return total
    (reader, *others) = total.users
    is_cast = is_call(reader, "to") and reader.meta["val"].dtype == dtype
    return reader if is_cast and not others else None
