"""Multiplies experts' rows tile by tile on Hopper's tensor cores, in pieces for many tokens."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import NO_CUDA_COMPILER, VARIANTS, GraphPass, PassResult, PassTarget
from mllm_compile.passes.match.nodes import call, is_op, replace_by_op, rewrite_pieces
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.expert_tiles.kernel import BLOCK, is_taken
from mllm_compile.runtime.ops.experts.shapes import most_blocks


class TileExperts(GraphPass):
    """Multiplies both linears of experts by kernels that read weights and rows by TMA, for clusters of blocks.

    Why: Triton's grouped product is bound by what the L2 cache gives: each block of it reads its rows and its weights
        for itself (figures in docs/lab/performance.md).

    Before::

        order, blocks = mllm.order_experts(ids, slots, E, 128, 0)
        a = mllm.grouped_linear(x, order, blocks, gate_up, None, k, False, True, True, 128)
        y = mllm.grouped_linear(a, order, blocks, down, None, k, False, False, False, 128)

    After::

        order, blocks = mllm.order_experts(ids, slots, E, 256, 0)
        a = mllm.gated_expert_tiles(x, order, blocks, gate_up, k)
        y = mllm.expert_tiles(a, order, blocks, down, ids)

    If none of an order's linears is gated, each becomes::

        rows = x[clamp(order, 0, R - 1) // k]
        y = mllm.expert_tiles(rows, order, blocks, weight, ids) + where(is_expert, bias[ids], 0)

    Requires: pieces by group_experts on a Hopper GPU in bfloat16, with variants for fewer tokens; no bias of a gated
        linear or behind it, and weights as linears have them.
    Preserves: each linear, its bias, silu and the product are rounded where the model rounds them, or later.
    """

    name: ClassVar[str] = "tile_experts"
    needs: ClassVar[tuple[str, ...]] = ("gated_expert_tiles", "expert_tiles")

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        return None if target.compiles_cuda else NO_CUDA_COMPILER

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        matches = rewrite_pieces(gm, list(gm.meta.get(VARIANTS, {})), _tile)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _tile(graph: fx.Graph, node: fx.Node) -> bool:
    """Rewrites an order of rows and the linears that read it."""
    if not is_op(node, "order_experts"):
        return False
    if (found := _linears_of(node)) is not None:
        _use_tiles(node)
        _tile_gated(graph, node, *found)
    elif linears := _plain_linears_of(node):
        _use_tiles(node)
        for linear in linears:
            _tile_plain(graph, node, linear)
    else:
        return False
    return True


def _use_tiles(node: fx.Node) -> None:
    """Gives an order the tiles' blocks."""
    ids: Any
    num_experts: Any
    ids, slots, num_experts, *_ = node.args
    node.args = (ids, slots, num_experts, BLOCK, 0)
    val = ids.meta["val"]
    num_blocks = most_blocks(val.shape[0] * val.shape[1], num_experts, BLOCK)
    sizes = num_blocks * BLOCK, (num_blocks, 2)
    node.meta["val"] = tuple(val.new_empty(size, dtype=torch.int32) for size in sizes)
    for part in node.users:
        part.meta["val"] = node.meta["val"][part.args[1]]


def _tile_gated(graph: fx.Graph, node: fx.Node, up: Any, down: Any) -> None:
    x, order, blocks, gate_up, _, num_chosen, *_ = up.args
    activated = replace_by_op(graph, up, op("gated_expert_tiles"), x, order, blocks, gate_up, num_chosen)
    num_places = order.meta["val"].shape[0]
    activated.meta["val"] = activated.meta["val"].new_empty((num_places, activated.meta["val"].shape[1]))
    replace_by_op(graph, down, op("expert_tiles"), activated, order, blocks, down.args[3], node.args[0])


def _tile_plain(graph: fx.Graph, node: fx.Node, linear: Any) -> None:
    x, order, blocks, weight, bias, num_chosen, _, of_tokens, *_ = linear.args
    ids: Any = node.args[0]
    num_experts: Any = node.args[2]
    with graph.inserting_before(linear):
        # Places of no row hold anything, those whose row has no expert its complement.
        sources = call(graph, operator.floordiv, order, num_chosen) if of_tokens else order
        last = call(graph, operator.sub, call(graph, torch.ops.aten.sym_size.int, x, 0), 1)
        rows = call(graph, torch.index_select, x, 0, call(graph, torch.clamp, sources, 0, last))
    product = replace_by_op(graph, linear, op("expert_tiles"), rows, order, blocks, weight, ids)
    if bias is None:
        return
    with graph.inserting_before(product.next):
        flat = call(graph, torch.reshape, ids, (-1,))
        chosen = call(graph, torch.clamp, flat, 0, num_experts - 1)
        is_expert = call(graph, operator.eq, flat, chosen)
        added = call(graph, torch.index_select, bias, 0, chosen)
        added = call(graph, torch.where, call(graph, torch.unsqueeze, is_expert, -1), added, 0.0)
        total = call(graph, operator.add, product, added)
    product.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)


def _linears_of(order: fx.Node) -> tuple[Any, Any] | None:
    """The gated linear of tokens and the linear of its outputs that alone read an order, if the kernels take them."""
    readers: set[Any] = {reader for part in order.users for reader in part.users}
    if len(readers) != 2 or not all(is_op(reader, "grouped_linear") for reader in readers):
        return None
    up, down = sorted(readers, key=lambda reader: reader.args[7], reverse=True)  # of_tokens
    (of_up, of_down) = ((reader.args[4], reader.args[6:9]) for reader in (up, down))
    if of_up != (None, (False, True, True)) or of_down != (None, (False, False, False)):
        return None
    if down.args[0] is not up or len(up.users) != 1:
        return None
    (_, rows, columns), (_, outputs, inputs) = (reader.args[3].meta["val"].shape for reader in (up, down))
    values = [reader.args[place].meta["val"] for reader in (up, down) for place in (0, 3)]
    is_bfloat16 = all(value.dtype == torch.bfloat16 for value in values)
    return (up, down) if is_bfloat16 and is_taken(rows // 2, columns) and is_taken(outputs, inputs) else None


def _plain_linears_of(order: fx.Node) -> list[Any]:
    """The linears that read an order, in the graph's order, if the kernels take them all and none is gated."""
    readers: dict[Any, None] = {reader: None for part in order.users for reader in part.users}
    return list(readers) if all(map(_is_plain, readers)) else []


def _is_plain(reader: Any) -> bool:
    if not is_op(reader, "grouped_linear"):
        return False
    operands: Any = reader.args
    x, _, _, weight, bias, _, is_transposed, _, is_gated, _ = operands
    is_bfloat16 = all(one.meta["val"].dtype == torch.bfloat16 for one in (x, weight, bias) if one is not None)
    _, outputs, inputs = weight.meta["val"].shape
    return not (is_transposed or is_gated) and is_bfloat16 and is_taken(outputs, inputs)
