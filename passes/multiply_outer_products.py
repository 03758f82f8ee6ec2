"""Replaces a product of one column and one row by a multiplication of their elements."""

from __future__ import annotations

import operator
from typing import ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import GraphPass, PassResult
from mllm_compile.passes.match.nodes import call, drop_dead_nodes, is_call


class MultiplyOuterProducts(GraphPass):
    """Turns matrix products that add nothing up into multiplications.

    Why: Transformers 5.17 computes the angles of rotary positions by such a product (5.23 multiplies). A GEMM is a
        kernel of its own at the start of every step, after another that converts the positions; a multiplication
        becomes part of the kernel that takes the cosines.

    Before::

        angles = inv_freq[None, :, None].float() @ positions[:, None, :].float()

    After::

        angles = inv_freq[None, :, None].float() * positions[:, None, :].float()

    Requires: a canonical graph.
    Preserves: every value bitwise except the sign of zeros, if products have their operands' precision. With
        TensorFloat-32 they gain the digits that it drops.
    """

    name: ClassVar[str] = "multiply_outer_products"

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        products = [node for node in gm.graph.nodes if _is_outer_product(node)]
        for node in products:
            column, row = node.args
            with gm.graph.inserting_before(node):
                node.replace_all_uses_with(call(gm.graph, operator.mul, column, row))
        drop_dead_nodes(gm)
        return PassResult(gm, len(products), before, len(gm.graph.nodes))


def _is_outer_product(node: fx.Node) -> bool:
    """[..., M, 1] times [..., 1, N], both floating-point."""
    if not is_call(node, operator.matmul, torch.bmm):
        return False
    column, row = (operand.meta["val"] for operand in node.args if isinstance(operand, fx.Node))
    return (
        min(column.ndim, row.ndim) >= 2
        and column.dtype == row.dtype
        and column.dtype.is_floating_point
        and _is_one(column.shape[-1])
        and _is_one(row.shape[-2])
    )


def _is_one(size: int | torch.SymInt) -> bool:
    """True if `size` is known to be 1, which a size that a step decides is not."""
    return isinstance(size, int) and size == 1
