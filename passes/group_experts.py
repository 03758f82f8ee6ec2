"""Puts kernels in the place of experts' linears: rows in order of their expert, and a product for a block of them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import ANY_ROWS, EXPERT_RANKS, VARIANTS, GraphPass, PassResult
from mllm_compile.passes.match.experts import match_expert_linear
from mllm_compile.passes.match.linear import match_silu_mul
from mllm_compile.passes.match.nodes import called_pieces, drop_dead_nodes, replace_by_op
from mllm_compile.passes.token_slots import give_slots, slots_in
from mllm_compile.passes.variants import copy_of
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.experts.shapes import (
    ONE_ROW,
    ROWS_IN_ANY_STEP,
    VARIANT_TOKENS,
    most_blocks,
    rows_at_once,
    rows_of_block,
)


class GroupExperts(GraphPass):
    """Multiplies the rows of each expert together, by kernels that read no expert's weight but those chosen.

    Why: the trace's op waits for the router's choice on the host, so it cannot be in a CUDA graph. torch 2.11's
        AOTInductor has no grouped product. With few tokens a step's time is the reading of the chosen experts' weights
        (figures in docs/lab/performance.md).

    Before::

        h = mllm.expert_linear(x, ids, gate_up, None, False, True)
        gate, up = chunk(h, 2, -1); a = silu(gate) * up
        y = mllm.expert_linear(a, ids, down, None, False, False)

    After::

        order, blocks = mllm.order_experts(ids, slots, E, B, …)
        a = mllm.grouped_linear(x, order, blocks, gate_up, None, k, False, True, True, B)
        y = mllm.grouped_linear(a, order, blocks, down, None, k, False, False, False, B)

    Any other activation stays between two products. Quantised weights get `quantised_grouped_linear`. A piece with
    experts gets variants for 1, 64 and 256 tokens where it has none, as a block's size depends on the step's; and the
    input `slots`, which tells padding apart. With ANY_ROWS it gets no variants: one size of block, and one order of
    sums, is for all steps.

    Requires: pieces on CUDA with all their variants.
    Preserves: the meaning. Products are summed in float32 in another order than cuBLAS'.
    """

    name: ClassVar[str] = "group_experts"
    needs: ClassVar[tuple[str, ...]] = ("order_experts", "grouped_linear", "quantised_grouped_linear")

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        matches = 0
        has_one_form = gm.meta.get(ANY_ROWS, False)
        for name in called_pieces(gm):
            piece: Any = gm.get_submodule(name)
            if any(_expert_linears(piece.graph)):
                if not has_one_form:
                    _add_variants(gm, name)
                num_ranks = gm.meta.get(EXPERT_RANKS, 1)  # of as many ranks' tokens, if experts are spread
                give_slots(gm, name, num_ranks)
                block = ROWS_IN_ANY_STEP if has_one_form else None
                matches += sum(_group(variant, most, num_ranks, block) for variant, most in _with_variants(gm, name))
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _expert_linears(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if match_expert_linear(node))


def _add_variants(gm: fx.GraphModule, name: str) -> None:
    """Copies the variant that a step of so many tokens has now, if it has linears of experts and none of that size."""
    variants = gm.meta.setdefault(VARIANTS, {}).setdefault(name, {})
    for size in VARIANT_TOKENS:
        source: Any = gm.get_submodule(min((one for one in variants.items() if one[0] >= size), default=(0, name))[1])
        if size not in variants and any(_expert_linears(source.graph)):
            variants[size] = f"{name}_grouped_{size}"
            gm.add_module(variants[size], copy_of(source))


def _with_variants(gm: fx.GraphModule, name: str) -> Iterator[tuple[Any, int | None]]:
    """The piece and its variants, each with its most tokens."""
    yield gm.get_submodule(name), None
    for size, variant in gm.meta.get(VARIANTS, {}).get(name, {}).items():
        yield gm.get_submodule(variant), size


def _group(piece: fx.GraphModule, most_tokens: int | None, num_ranks: int, rows: int | None) -> int:
    """Groups the linears of one piece or variant; returns how many there were.

    Args:
        rows: of each block; None: by the number of tokens.
    """
    graph = piece.graph
    slots = slots_in(graph, num_ranks)
    most_tokens = most_tokens and most_tokens * num_ranks
    orders: dict[tuple[fx.Node, int], tuple[fx.Node, fx.Node | None]] = {}
    linears: list[Any] = list(_expert_linears(graph))
    for node in linears:
        linear: Any = match_expert_linear(node)
        ids, num_chosen, num_experts = linear.ids, linear.num_chosen, linear.num_experts
        block = rows or rows_of_block(most_tokens, num_chosen, num_experts)
        if (ids, num_experts) not in orders:
            most_rows = rows_at_once(most_tokens, num_chosen)
            with graph.inserting_before(node):
                order = (ids, None) if block == ONE_ROW else _order(graph, ids, slots, num_experts, block, most_rows)
            orders[ids, num_experts] = order
        activated = _activated(node)
        place = activated or node
        operands = linear.x, *orders[ids, num_experts], linear.weight
        how = (linear.of_tokens, activated is not None, block)
        if linear.scales is None:
            plain = linear.bias, num_chosen, linear.is_transposed
            replace_by_op(graph, place, op("grouped_linear"), *operands, *plain, *how)
        else:
            quantised = linear.scales, linear.zeros, linear.bias, linear.kind, linear.group, num_chosen
            replace_by_op(graph, place, op("quantised_grouped_linear"), *operands, *quantised, *how)
    drop_dead_nodes(piece)
    piece.recompile()
    return len(linears)


def _order(
    graph: fx.Graph, ids: fx.Node, slots: fx.Node, num_experts: int, block: int, most_rows: int
) -> tuple[fx.Node, fx.Node]:
    both = graph.call_function(op("order_experts"), (ids, slots, num_experts, block, most_rows))
    order, blocks = (graph.call_function(operator.getitem, (both, index)) for index in (0, 1))
    val = ids.meta["val"]
    num_blocks = most_blocks(val.shape[0] * val.shape[1], num_experts, block)
    order.meta["val"] = val.new_empty(num_blocks * block, dtype=torch.int32)
    blocks.meta["val"] = val.new_empty((num_blocks, 2), dtype=torch.int32)
    both.meta["val"] = (order.meta["val"], blocks.meta["val"])
    return order, blocks


def _activated(node: fx.Node) -> fx.Node | None:
    """silu(gate) * up of the two halves of the linear's outputs, if nothing else reads them."""
    halves = next(iter(node.users), None)
    if halves is None or len(node.users) != 1:
        return None
    readers = [reader for half in halves.users for reader in half.users]
    products = [user for reader in readers for user in (reader, *reader.users)]
    return next((one for one in products if match_silu_mul(one) is node), None)
