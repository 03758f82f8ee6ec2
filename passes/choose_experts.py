"""Makes a router's choice of experts one kernel, with the softmax before or after it and the renormalisation."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import torch
from torch import fx
from torch.nn import functional

from mllm_compile.passes.base import GraphPass, PassResult
from mllm_compile.passes.match import nodes
from mllm_compile.passes.match.nodes import called_pieces, is_call, rewrite_pieces
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.experts.shapes import (
    MOST_CHOSEN,
    MOST_EXPERTS,
    NO_SOFTMAX,
    SOFTMAX_OF_ALL,
    SOFTMAX_OF_CHOSEN,
)

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class ChooseExperts(GraphPass):
    """Takes the largest of each token's scores by a kernel of ours.

    Why: torch.topk of a few rows is two kernels of the library, and what is around it in a router one or two more,
        in every layer of every step.

    Before::

        p = softmax(logits, dtype=f32, dim=-1); v, ids = topk(p, k, dim=-1); w = v / sum(v, dim=-1, keepdim=True)

    After::

        w, ids = mllm.choose_experts(logits, k, SOFTMAX_OF_ALL, True)

    likewise without the division, with a softmax of the chosen scores, or for topk alone.

    Requires: deduplicated pieces on CUDA. Of up to 1,024 scores, up to 32 are chosen.
    Preserves: the choice, except among experts of equal scores, where it is the first (torch promises no order); the
        weights, except the order of a sum in float32.
    """

    name: ClassVar[str] = "choose_experts"
    needs: ClassVar[tuple[str, ...]] = ("choose_experts",)

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        matches = rewrite_pieces(gm, called_pieces(gm), _choose)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _choose(graph: fx.Graph, node: fx.Node) -> bool:
    operands = _topk(node)
    if operands is None:
        return False
    scores, num_chosen = operands
    vals = list(node.meta["val"])
    values, ids = _part(node, 0), _part(node, 1)
    softmax, renormalise, weights = NO_SOFTMAX, False, values
    if len(scores.users) == 1 and scores.args and _is_softmax(scores, scores.args[:1], torch.float32):
        scores, softmax = scores.args[0], SOFTMAX_OF_ALL
    if values is not None and values.users:
        weights, renormalise = _renormalised(values)
        reader = next(iter(values.users))
        is_alone = weights is values and softmax == NO_SOFTMAX and len(values.users) == 1
        if is_alone and _is_softmax(reader, (values,), vals[0].dtype):
            weights, softmax = reader, SOFTMAX_OF_CHOSEN
    with graph.inserting_before(node):
        both = graph.call_function(op("choose_experts"), (scores, num_chosen, softmax, renormalise))
        parts = [graph.call_function(operator.getitem, (both, index)) for index in (0, 1)]
    both.meta.update(node.meta, val=tuple(vals))
    for part, val, old in zip(parts, vals, (weights, ids), strict=True):
        part.meta["val"] = val
        if old is not None:
            old.replace_all_uses_with(part)
    return True


def _topk(node: fx.Node) -> tuple[Any, int] | None:
    """Scores and k of a topk of each row's largest, if the kernel takes them."""
    if not is_call(node, torch.topk, "topk"):
        return None
    said: dict[str, Any] = dict(zip(("input", "k", "dim", "largest", "sorted"), node.args, strict=False)) | node.kwargs
    scores, num_chosen, dim = said["input"], said["k"], said.get("dim", -1)
    val = scores.meta["val"]
    num_experts = val.shape[-1]
    is_of_rows = val.dim() >= 2 and dim in (-1, val.dim() - 1) and said.get("largest", True)
    is_small = isinstance(num_experts, int) and num_experts <= MOST_EXPERTS and isinstance(num_chosen, int)
    is_here = val.device.type == nodes.KERNEL_DEVICE_TYPE and val.dtype in _FLOATS
    return (scores, num_chosen) if is_of_rows and is_small and num_chosen <= MOST_CHOSEN and is_here else None


def _part(node: fx.Node, index: int) -> fx.Node | None:
    return next((user for user in node.users if is_call(user, operator.getitem) and user.args[1] == index), None)


def _is_softmax(node: object, operands: tuple[Any, ...], dtype: torch.dtype) -> bool:
    """True for a softmax of `operands` over their last dimension that gives `dtype`."""
    if not is_call(node, functional.softmax, torch.softmax, "softmax") or node.args[:1] != operands:
        return False
    dims = [node.kwargs["dim"]] if "dim" in node.kwargs else node.args[1:2]
    last = node.meta["val"].dim() - 1
    return len(dims) == 1 and dims[0] in (-1, last) and node.meta["val"].dtype == dtype


def _renormalised(values: fx.Node) -> tuple[fx.Node, bool]:
    """values / values.sum(-1, keepdim=True), if that is all that reads the values; else the values."""
    for node in values.users:
        if not is_call(node, operator.truediv) or node.args[0] is not values:
            continue
        total: Any = node.args[1]
        is_total = is_call(total, torch.sum, "sum") and total.args[0] is values and len(total.users) == 1
        is_all = is_total and set(values.users) == {node, total} and _sums_rows(total)
        if is_all and all(_is_float32(one) for one in (values, total, node)):
            return node, True
    return values, False


def _sums_rows(total: fx.Node) -> bool:
    said: dict[str, Any] = dict(zip(("input", "dim", "keepdim"), total.args, strict=False)) | total.kwargs
    dims = said.get("dim")
    last = total.meta["val"].dim() - 1
    return dims in (-1, last, [-1], (-1,)) and bool(said.get("keepdim"))


def _is_float32(node: fx.Node) -> bool:
    is_wide: bool = node.meta["val"].dtype == torch.float32
    return is_wide
