"""Computes what adapters add by kernels, two for a linear."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.add_lora import AddLora, places_of_slots
from mllm_compile.passes.base import ANY_ROWS, VARIANTS, GraphPass, PassResult, PassTarget
from mllm_compile.passes.lora_chains import chain
from mllm_compile.passes.match.linear import match_adapted_linear, match_silu_mul
from mllm_compile.passes.match.nodes import call, called_pieces, is_op, replace_by_op, rewrite_pieces, takes_kernels
from mllm_compile.passes.variants import add_variants, copy_of
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.lora.shapes import MOST_FEW_TOKENS, num_splits, takes_gated, takes_lora


class LaunchLora(GraphPass):
    """Puts two kernels in the place of mllm.add_lora.

    Why: in plain torch it is several launches for each adapter in memory, used or not. These two read the factors of
        those alone that tokens have.

    Before::

        y = mllm.add_lora(linear(x, weight), x, lora_A, lora_B, adapter_slots, starts, rows)

    After::

        shrunk = mllm.lora_shrink(x, lora_A, adapter_slots, False, True)
        y = mllm.lora_expand(linear(x, weight), shrunk, lora_B, adapter_slots, starts, rows, False, True)

    or mllm.lora_expand_gated where silu(gate) * up of y's halves is all that is read of it; with True in variants for
    few tokens in the place of False. For many tokens a plain linear adds to what B has written, in one op::

        y = mllm.lora_linear(x, weight, lora_A, lora_B, adapter_slots, starts, rows)

    but for deterministic steps, whose linears have one order of sums. The other True says that slots are the program's
    input, and not made by a kernel. A piece with adapters and no such variant gets one. Of mllm.add_lora_of_ids the
    first is a gather of rows of A. Rows of mllm.add_lora_of_experts have a slot for each pair of an adapter and an
    expert.
    mllm.scale_of_adapters becomes plain torch. Between linears of few tokens kernels are joined (lora_chains.py).

    Requires: pieces on CUDA in bfloat16 or float16, all their other variants made.
    Preserves: the meaning; products with A are summed in float32, and rounded once.
    """

    name: ClassVar[str] = "launch_lora"
    needs: ClassVar[tuple[str, ...]] = (
        "lora_shrink",
        "lora_expand",
        "lora_expand_gated",
        "lora_expand_norm",
        "lora_linear",
        "lora_expand_gated_chained",
    )

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        return AddLora.obstacle(target)

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        add_variants(gm, MOST_FEW_TOKENS, "_few_adapters", _few)
        variants: dict[str, dict[int, str]] = gm.meta.get(VARIANTS, {})
        matches = 0
        for name in called_pieces(gm):
            early = places_of_slots(gm, name)
            joins = not gm.meta.get(ANY_ROWS)
            matches += rewrite_pieces(gm, [name], partial(_launch, is_few=False, early=early, joins=joins))
            small = variants.get(name, {}).values()
            matches += rewrite_pieces(gm, small, partial(_launch, is_few=True, early=early, joins=False))
            rewrite_pieces(gm, small, chain)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _few(piece: fx.GraphModule) -> fx.GraphModule | None:
    """A copy of a piece with adapters."""
    return copy_of(piece) if any(_is_taken(node) for node in piece.graph.nodes) else None


def _is_taken(node: fx.Node) -> bool:
    if is_op(node, "scale_of_adapters"):
        return takes_kernels(node)
    if not is_op(node, "add_lora", "add_lora_of_experts", "add_lora_of_ids") or not takes_kernels(node):
        return False
    return takes_lora(_size(node), *_outputs(node))


def _outputs(node: fx.Node) -> tuple[list[int], list[int]]:
    """The first output of each part, and how many there are."""
    operands: Any = node.args
    return operands[5:] if is_op(node, "add_lora") else ([0], [_size(node)])


def _launch(graph: fx.Graph, node: fx.Node, is_few: bool, early: frozenset[int], joins: bool) -> bool:
    """`joins`: plain linears add to what their adapters do."""
    if not _is_taken(node):
        return False
    operands: Any = node.args
    if is_op(node, "scale_of_adapters"):
        with graph.inserting_before(node):
            scaled = _scaled(graph, *operands)
        node.replace_all_uses_with(scaled)
        graph.erase_node(node)
        return True
    linear = match_adapted_linear(node) if joins and _product(node) is None else None
    if linear is not None:
        replace_by_op(graph, node, op("lora_linear"), linear.source, linear.weight, *operands[2:])
        return True
    y, x, a, b, slots = operands[:5]
    with graph.inserting_before(node):
        if is_op(node, "add_lora_of_experts"):
            x, a, b, slots = _of_rows(graph, *operands[1:])
        is_gathered = is_op(node, "add_lora_of_ids")
        placeholders = (one for one in graph.nodes if one.op == "placeholder")
        is_early = any(one is slots and place in early for place, one in enumerate(placeholders))
        shrunk = _gathered(graph, x, a, slots) if is_gathered else shrunk_of(graph, x, a, slots, is_few, is_early)
    product, expand = _product(node), "lora_expand_gated"
    if product is None:
        product, expand = node, "lora_expand"
    replace_by_op(graph, product, op(expand), y, shrunk, b, slots, *_outputs(node), is_few, is_early)
    return True


def _product(node: fx.Node) -> fx.Node | None:
    """silu(gate) * up of the halves of what adapters change, where nothing else is read of that."""
    if len(node.users) != 1 or not is_op(node, "add_lora") or not takes_gated(_size(node), *_outputs(node)):
        return None
    (reader,) = node.users
    if is_op(reader, "silu_mul"):
        return reader
    if any(len(half.users) != 1 for half in reader.users):
        return None
    found = {product for half in reader.users for gate in (half, *half.users) for product in gate.users}
    return next((product for product in found if match_silu_mul(product) is node), None)


def _size(node: fx.Node) -> int:
    return int(node.meta["val"].shape[-1])


def shrunk_of(graph: fx.Graph, x: fx.Node, a: fx.Node, slots: fx.Node, is_few: bool, is_early: bool) -> fx.Node:
    """mllm.lora_shrink of inputs."""
    val = x.meta["val"]
    splits, dtype = (num_splits(int(val.shape[-1])), torch.float32) if is_few else (1, val.dtype)
    shrunk = graph.call_function(op("lora_shrink"), (x, a, slots, is_few, is_early))
    shrunk.meta["val"] = val.new_empty((splits, slots.meta["val"].shape[0], a.meta["val"].shape[1]), dtype=dtype)
    return shrunk


def _gathered(graph: fx.Graph, ids: fx.Node, a: fx.Node, slots: fx.Node) -> fx.Node:
    """[1, T, r] of the ids' rows of A; any slot's where a token has none."""
    flat, some = call(graph, torch.reshape, ids, (-1,)), call(graph, torch.clamp, slots, 0)
    rows = call(graph, operator.getitem, a, (some, flat))
    return call(graph, torch.unsqueeze, rows, 0)


def _of_rows(
    graph: fx.Graph, x: fx.Node, a: fx.Node, b: fx.Node, slots: fx.Node, ids: fx.Node, of_tokens: bool
) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node]:
    """Rows [T * k, K], the factors of all slots' experts, and the pair of both that each row has."""
    _, num_experts, rank, inputs = a.meta["val"].shape
    outputs, num_chosen = b.meta["val"].shape[2], ids.meta["val"].shape[1]
    a = call(graph, torch.reshape, a, (-1, rank, inputs))
    b = call(graph, torch.reshape, b, (-1, outputs, rank))
    if of_tokens:
        rows = call(graph, torch.unsqueeze, x, 1)
        x = call(graph, torch.reshape, call(graph, torch.cat, [rows] * num_chosen, 1), (-1, inputs))
    of_token = call(graph, torch.unsqueeze, slots, 1)
    has_both = call(graph, torch.logical_and, call(graph, torch.ge, of_token, 0), call(graph, torch.ge, ids, 0))
    both = call(graph, operator.add, call(graph, operator.mul, of_token, num_experts), ids)
    return x, a, b, call(graph, torch.flatten, call(graph, torch.where, has_both, both, -1))


def _scaled(graph: fx.Graph, y: fx.Node, scales: fx.Node, bias: fx.Node | None, slots: fx.Node) -> fx.Node:
    """Outputs times their adapters' scales, but for the bias."""
    rows = call(graph, operator.getitem, scales, (call(graph, torch.clamp, slots, 0),))
    has_one = call(graph, torch.unsqueeze, call(graph, torch.ge, slots, 0), 1)
    of_tokens = call(graph, torch.where, has_one, rows, 1.0)
    scaled = call(graph, operator.mul, y, of_tokens)
    if bias is None:
        return scaled
    return call(graph, operator.add, scaled, call(graph, operator.mul, bias, call(graph, torch.rsub, of_tokens, 1.0)))
