"""Multiplies experts' rows tile by tile on Hopper's tensor cores, in pieces for many tokens."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import NO_CUDA_COMPILER, VARIANTS, GraphPass, PassResult, PassTarget
from mllm_compile.passes.match.nodes import is_op, replace_by_op, rewrite_pieces
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

    Requires: pieces by group_experts on a Hopper GPU in bfloat16, with variants for fewer tokens; no bias, and weights
    as
        linears have them.
    Preserves: each linear, silu and the product are rounded where the model rounds them.
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
    """Rewrites an order of rows and the two linears that read it."""
    found = _linears_of(node) if is_op(node, "order_experts") else None
    if found is None:
        return False
    up, down = found
    ids: Any
    num_experts: Any
    ids, slots, num_experts, *_ = node.args
    x, gate_up, num_chosen, down_weight = up.args[0], up.args[3], up.args[5], down.args[3]
    order, blocks = up.args[1], up.args[2]
    node.args = (ids, slots, num_experts, BLOCK, 0)
    val = ids.meta["val"]
    num_blocks = most_blocks(val.shape[0] * val.shape[1], num_experts, BLOCK)
    order.meta["val"] = val.new_empty(num_blocks * BLOCK, dtype=torch.int32)
    blocks.meta["val"] = val.new_empty((num_blocks, 2), dtype=torch.int32)
    node.meta["val"] = (order.meta["val"], blocks.meta["val"])
    activated = replace_by_op(graph, up, op("gated_expert_tiles"), x, order, blocks, gate_up, num_chosen)
    activated.meta["val"] = activated.meta["val"].new_empty((num_blocks * BLOCK, activated.meta["val"].shape[1]))
    replace_by_op(graph, down, op("expert_tiles"), activated, order, blocks, down_weight, ids)
    return True


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
