"""Lets a cluster of blocks have whole rows of many tokens with adapters on Hopper."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.add_lora import AddLora
from mllm_compile.passes.base import NO_CUDA_COMPILER, GraphPass, PassResult, PassTarget
from mllm_compile.passes.lora_chains import residual_of
from mllm_compile.passes.match.nodes import called_pieces, is_op, replace_by_op, rewrite_pieces
from mllm_compile.passes.match.rms_norm import match_rms_norm
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.lora_clusters.kernel import takes_norm, takes_shrink


class LaunchLoraClusters(GraphPass):
    """Joins a product with B, the residual and the norm behind it, and the product with A of what is normed. Other
    products with A are one kernel in the place of two.

    Why: by themselves the former are four kernels, and each reads all tokens again.

    Before::

        o_shrunk = mllm.lora_shrink(x, o_a, slots, False, True)
        h = residual + mllm.lora_expand(o, o_shrunk, o_b, slots, [0], [N], False, True)
        x = rms_norm(h, norm_weight)
        shrunk = mllm.lora_shrink(x, a, slots, False, True)

    After::

        o_shrunk = mllm.lora_shrink_in_clusters(x, o_a, slots, True)
        h, x, shrunk = mllm.lora_norm_in_clusters(o, o_shrunk, o_b, slots, residual, norm_weight, eps, False, a)

    Requires: pieces for many tokens, with adapters by launch_lora, in bfloat16 on a Hopper GPU.
    Preserves: the sum. A norm is rounded once, behind its weight, as by Inductor.
    """

    name: ClassVar[str] = "launch_lora_clusters"
    needs: ClassVar[tuple[str, ...]] = ("lora_norm_in_clusters", "lora_shrink_in_clusters")

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        return AddLora.obstacle(target) or (None if target.compiles_cuda else NO_CUDA_COMPILER)

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before, names = len(gm.graph.nodes), called_pieces(gm)
        matches = rewrite_pieces(gm, names, _join) + rewrite_pieces(gm, names, _multiply)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _join(graph: fx.Graph, node: fx.Node) -> bool:
    if not is_op(node, "lora_expand"):
        return False
    operands: Any = node.args
    y, shrunk, b, slots, starts, rows, is_few, early_slots, *_ = operands
    found, width = residual_of(node), int(node.meta["val"].shape[-1])
    if found is None or is_few or not early_slots or (list(starts), list(rows)) != ([0], [width]):
        return False
    total, residual = found
    norms = [(one, norm) for one in graph.nodes if (norm := match_rms_norm(one)) is not None and norm.x is total]
    shrinks = [reader for normed, _ in norms for reader in normed.users if is_op(reader, "lora_shrink")]
    if len(norms) != 1 or len(shrinks) != 1 or shrinks[0].args[2:4] != (slots, False):
        return False
    (normed, norm), (shrink,) = norms[0], shrinks
    next_a: Any = shrink.args[1]
    read = y, shrunk, b, residual, norm.weight, next_a
    if {one.meta["val"].dtype for one in read} != {torch.bfloat16} or {next_a.op, norm.weight.op} != {"placeholder"}:
        return False
    if not takes_norm(width, int(b.meta["val"].shape[2]), int(next_a.meta["val"].shape[1])):
        return False
    taken = y, shrunk, b, slots, residual, norm.weight, norm.eps, norm.plus_one, next_a
    replaced = total, normed, shrink
    with graph.inserting_before(total):
        made = graph.call_function(op("lora_norm_in_clusters"), taken)
        results = [graph.call_function(operator.getitem, (made, index)) for index in range(len(replaced))]
    made.meta["val"] = tuple(one.meta["val"] for one in replaced)
    for one, result in zip(replaced, results, strict=True):
        result.meta.update(one.meta)
        one.replace_all_uses_with(result)
    return True


def _multiply(graph: fx.Graph, node: fx.Node) -> bool:
    operands: Any = node.args
    if not is_op(node, "lora_shrink") or operands[3]:
        return False
    x, a, slots, _, early_slots = operands
    _, rows, columns = map(int, a.meta["val"].shape)
    if x.meta["val"].dtype != torch.bfloat16 or not takes_shrink(columns, rows):
        return False
    replace_by_op(graph, node, op("lora_shrink_in_clusters"), x, a, slots, early_slots)
    return True
