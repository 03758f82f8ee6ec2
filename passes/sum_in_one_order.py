"""Gives steps of few rows, in the deterministic mode on Hopper, linears of their own with the bits of many rows."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import NO_CUDA_COMPILER, GraphPass, PassResult, PassTarget
from mllm_compile.passes.match.linear import Linear, match_linear
from mllm_compile.passes.match.nodes import LINEAR, called_pieces, is_call, is_op, replace_by_op, rewrite_pieces
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.stream_linear.undivided import is_taken


class SumInOneOrder(GraphPass):
    """Makes each linear an op that takes a kernel of ours for up to LEAST_ROWS rows, and the library's for more.

    Why: the library adds up few rows in another order than many, or slowly, so that a step had 64 rows. And its kernels
        wait for the one ahead, while ours load their weight (figures in docs/lab/serving.md).

    Before::

        y = linear(x, weight, bias); z = mllm.gated_linear(y, gate_up)

    After::

        y = mllm.linear_in_one_order(x, weight, bias, gate_up); z = mllm.gated_linear_in_one_order(y, gate_up)

    The first linear of a piece is told the next one's weight: it waits for attention, while the memory rests.

    Requires: steps of any number of rows on one rank, whose norms and sums over ranks are kernels by number of rows
        otherwise; and all linears of plain weights in bfloat16 that divide into tiles. Else none is rewritten, and
        steps have the library's least number of rows.
    Preserves: every bit, as the compile tries (mllm_compile/check/few_rows.py).
    """

    name: ClassVar[str] = "sum_in_one_order"
    needs: ClassVar[tuple[str, ...]] = ("linear_in_one_order", "gated_linear_in_one_order")

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        if not target.any_rows:
            return "only deterministic steps of any number of rows depend on the order of sums"
        if max(target.num_ranks, target.num_expert_ranks, target.num_stages) > 1:
            return "kernels of sums over ranks go by the number of rows"
        return None if target.compiles_cuda else NO_CUDA_COMPILER

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        pieces = called_pieces(gm)
        nodes = [node for name in pieces for node in gm.get_submodule(name).graph.nodes]  # type: ignore[union-attr]
        linears = [node for node in nodes if is_call(node, LINEAR) or is_op(node, "quantised_linear")]
        matches = rewrite_pieces(gm, pieces, _rewrite) if all(map(_match, linears)) else 0
        for name in pieces if matches else ():
            _tell_next_weight(gm.get_submodule(name).graph)  # type: ignore[arg-type]
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _match(node: fx.Node) -> Linear | None:
    linear = match_linear(node, takes_bias=True)
    is_ours = linear is not None and is_taken(*linear.shape) and linear.weight.meta["val"].dtype == torch.bfloat16
    return linear if is_ours else None


def _tell_next_weight(graph: fx.Graph) -> None:
    linears = [node for node in graph.nodes if is_op(node, *SumInOneOrder.needs)]
    if len(linears) > 1 and is_op(linears[0], "linear_in_one_order"):
        linears[0].args = (*linears[0].args[:3], linears[1].args[1])


def _rewrite(graph: fx.Graph, node: fx.Node) -> bool:
    if is_op(node, "gated_linear"):
        replace_by_op(graph, node, op("gated_linear_in_one_order"), *node.args)
        return True
    linear = _match(node)
    if linear is None:
        return False
    replace_by_op(graph, node, op("linear_in_one_order"), linear.source, linear.weight, linear.bias)
    return True
