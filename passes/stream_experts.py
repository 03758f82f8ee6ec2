"""Adds variants of pieces for up to 8 tokens on Hopper, whose experts are two kernels that find the choice
themselves."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import NO_CUDA_COMPILER, NO_VARIANTS, VARIANTS, GraphPass, PassResult, PassTarget
from mllm_compile.passes.fuse_few_tokens import few_token_variant
from mllm_compile.passes.match.experts import match_expert_linear, match_weighted_sum
from mllm_compile.passes.match.linear import match_silu_mul
from mllm_compile.passes.match.nodes import (
    LINEAR,
    are_alike,
    call,
    called_pieces,
    drop_dead_nodes,
    is_call,
    is_op,
    linear_operands,
    replace_by_op,
)
from mllm_compile.passes.stream_linears import streamed
from mllm_compile.passes.token_slots import give_slots, slots_in
from mllm_compile.passes.variants import copy_of
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.experts.shapes import NO_SOFTMAX
from mllm_compile.runtime.ops.stream_experts.shapes import MAX_TOKENS, is_taken

_MOST_LEFT = 4 << 20  # elements of a weight that the library may multiply with


class StreamExperts(GraphPass):
    """Reads experts' weights by kernels of ours in steps of up to 8 tokens, with all that is around them.

    Why: in such steps the choice, the order of rows, the weighted sum, the residual and two norms are kernels of 2 µs
        each in every layer, during which no weight is read. Triton's products load weights late (figures in
        docs/lab/performance.md).

    Before::

        y = residual + linear(a, o); h = norm(y, norm_weight); scores = linear(h, router)
        w, ids = mllm.choose_experts(scores, k, SOFTMAX_OF_ALL, True)
        gate, up = chunk(mllm.expert_linear(h, ids, gate_up, …), 2, -1); a = silu(gate) * up
        rows = mllm.expert_linear(a, ids, down, …)
        z = y + (rows * reshape(w, (-1, 1))).view(T, k, -1).sum(1); q = linear(norm(z, next_norm), qkv)

    After::

        y, h, squares = mllm.stream_linear_residual_norm(a, o, residual, norm_weight)
        scores = mllm.stream_linear(h, router, squares, eps, False)
        a = mllm.stream_expert_up(h, gate_up, squares, eps, scores, None, slots, k, …)
        z, h, squares = mllm.stream_expert_down_norm(a, down, y, next_norm, scores, None, slots, k, …)
        q = mllm.stream_linear(h, qkv, squares, eps, False)

    A choice with other weights than choose_experts' is given to both with its weights. The variant is for those that
    fuse_single_token, stream_linears and group_experts would have for so few tokens.

    Requires: deduplicated pieces on a Hopper GPU in bfloat16, with choices by choose_experts; gated experts without
        biases, whose weights divide into the kernels' stages (shapes.py); large linears are stream_linears'.
    Preserves: as `stream_linears`; experts' linears, silu and products are rounded where the model rounds them.
    """

    name: ClassVar[str] = "stream_experts"
    needs: ClassVar[tuple[str, ...]] = ("stream_expert_up", "stream_expert_down", "stream_expert_down_norm")

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        if target.any_rows:
            return NO_VARIANTS
        return None if target.compiles_cuda else NO_CUDA_COMPILER

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        matches = 0
        variants: dict[str, dict[int, str]] = gm.meta.setdefault(VARIANTS, {})
        for name in called_pieces(gm):
            piece: Any = gm.get_submodule(name)
            if variants.get(name) or not any(_match(node) for node in piece.graph.nodes) or not _streams(piece):
                continue
            give_slots(gm, name)
            variant = copy_of(piece)
            matches += sum(_replace(variant.graph, node) for node in list(variant.graph.nodes))
            _flatten_later(variant.graph)
            drop_dead_nodes(variant)
            variant.recompile()
            variants[name] = {MAX_TOKENS: f"{name}_experts_{MAX_TOKENS}"}
            gm.add_module(variants[name][MAX_TOKENS], few_token_variant(variant, streamed(MAX_TOKENS)) or variant)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


@dataclass(frozen=True)
class _Experts:
    """The experts of a layer, added to something: all that the two kernels read, and the node that they end in."""

    total: fx.Node
    x: fx.Node
    gate_up: fx.Node
    down: fx.Node
    residual: fx.Node
    router: tuple[Any, ...]  # of the ops, except slots


def _streams(piece: fx.GraphModule) -> bool:
    """True if stream_linears has kernels for all linears but small ones: a router may be float32, a gate of one row."""
    ops = streamed(MAX_TOKENS)
    linears = (node for node in piece.graph.nodes if is_call(node, LINEAR))
    return all(ops.match(node) or linear_operands(node)[1].meta["val"].numel() <= _MOST_LEFT for node in linears)


def _replace(graph: fx.Graph, node: fx.Node) -> bool:
    found = _match(node)
    if found is None:
        return False
    choice, *rest = found.router
    router = (choice, rest[0], slots_in(graph), *rest[1:])
    with graph.inserting_before(node):
        rows = call(graph, op("stream_expert_up"), found.x, found.gate_up, None, 0.0, *router)
    replace_by_op(graph, node, op("stream_expert_down"), rows, found.down, found.residual, *router)
    return True


def _match(node: fx.Node) -> _Experts | None:
    """The experts whose weighted sum is added to something at `node`, if the kernels take them."""
    if not is_call(node, operator.add):
        return None
    for residual, added in (node.args, node.args[::-1]):
        total = _sum_in(added)
        operands = None if total is None else match_weighted_sum(total)
        if operands is not None and isinstance(residual, fx.Node) and are_alike(residual, node):
            return _match_linears(node, *operands, residual)
    return None


def _sum_in(added: Any) -> fx.Node | None:
    """The sum that `added` is a view of, in bfloat16, if nothing else reads either."""
    while isinstance(added, fx.Node) and len(added.users) == 1 and added.args:
        if is_call(added, torch.sum, "sum"):
            return added
        is_rounded = is_call(added, "to") and added.meta["val"].dtype == torch.bfloat16
        if not is_rounded and not _is_view(added):
            return None
        added = added.args[0]
    return None


def _match_linears(node: fx.Node, rows: Any, weights: Any, residual: fx.Node) -> _Experts | None:
    """The linears of the experts whose outputs are `rows`, if the kernels take them."""
    activated = _input_of_experts(rows, of_tokens=False)
    products: Any = None if activated is None else match_silu_mul(activated)
    x = None if products is None else _input_of_experts(products, of_tokens=True)
    if x is None or rows.args[1] is not products.args[1] or len(rows.users) != 1 or len(activated.users) != 1:
        return None
    gate_up, down = products.args[2], rows.args[2]
    (num_experts, _, inputs), (_, outputs, hidden) = (weight.meta["val"].shape for weight in (gate_up, down))
    router = _router(rows.args[1], weights)
    is_bfloat16 = all(value.meta["val"].dtype == torch.bfloat16 for value in (x, gate_up, down, residual))
    if router is None or not is_bfloat16 or not is_taken(num_experts, router[2], inputs, hidden, outputs):
        return None
    return _Experts(node, _unviewed(x), gate_up, down, residual, router)


def _input_of_experts(node: Any, of_tokens: bool) -> Any:
    """The input of an experts' linear without bias, with weights in linears' layout; else None."""
    linear = match_expert_linear(node)
    if linear is None or linear.bias is not None or linear.scales is not None:
        return None
    return linear.x if (linear.is_transposed, linear.of_tokens) == (False, of_tokens) else None


def _router(ids: Any, weights: Any) -> tuple[Any, ...] | None:
    """The ops' operands that say which experts: (choice, weights, k, softmax, renormalise, wide)."""
    chosen: Any = ids.args[0] if is_op(ids, "count_experts") else ids
    choice: Any = chosen.args[0] if is_call(chosen, operator.getitem) else None
    if not is_op(choice, "choose_experts") or chosen.args[1] != 1:
        return None
    scores: Any
    scores, num_chosen, softmax, renormalise = choice.args
    wide = weights.meta["val"].dtype == torch.float32
    own: Any = weights.args[0] if is_call(weights, "to") and not wide else weights
    # choose_experts gives them in float32, or rounded once to bfloat16.
    is_own = is_call(own, operator.getitem) and own.args == (choice, 0) and (own is weights or not wide)
    before: Any = scores.args[0] if is_call(scores, "to") else scores
    if before.meta["val"].dtype == torch.bfloat16:
        scores = before  # exactly the same numbers; a wide weight of such scores is one of a softmax
    is_read = scores.meta["val"].dtype in (torch.bfloat16, torch.float32)
    if ids is chosen and is_own and is_read and not (wide and softmax == NO_SOFTMAX):
        return scores, None, num_chosen, softmax, renormalise, wide
    return ids, weights, num_chosen, NO_SOFTMAX, False, wide


def _unviewed(node: Any) -> Any:
    """Returns the value before its leading dimensions were split or made one."""
    while _is_view(node):
        node = node.args[0]
    return node


def _is_view(node: Any) -> bool:
    """True for another shape of the same rows."""
    is_reshaped = is_call(node, torch.reshape, "view")
    return is_reshaped and node.args[0].meta["val"].shape[-1] == node.meta["val"].shape[-1]


def _flatten_later(graph: fx.Graph) -> None:
    """Makes linears of a flattened value flatten their outputs: what is flattened may be a norm, which then can go."""
    for node in list(graph.nodes):
        if not is_call(node, LINEAR):
            continue
        source, weight, bias = linear_operands(node)
        before = _unviewed(source)
        if before is not source:
            with graph.inserting_before(node):
                wide = call(graph, LINEAR, before, weight, bias)
                val = node.meta["val"]
                flat = call(graph, torch.reshape, wide, (*[-1] * (val.dim() - 1), val.shape[-1]))
            flat.meta.update(node.meta)
            node.replace_all_uses_with(flat)
            graph.erase_node(node)
