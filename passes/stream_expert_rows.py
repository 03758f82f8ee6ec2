"""Multiplies few rows of experts in MXFP4 by a kernel that streams weights, in variants for few tokens on Hopper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import NO_CUDA_COMPILER, NO_VARIANTS, VARIANTS, GraphPass, PassResult, PassTarget
from mllm_compile.passes.match.linear import match_clamped_swiglu
from mllm_compile.passes.match.nodes import is_op, replace_by_op, rewrite_pieces
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.stream_expert_rows.kernel import is_taken


class StreamExpertRows(GraphPass):
    """Multiplies rows by their experts' weights in MXFP4, each weight being read once at the memory's rate.

    Why: a step's time is the reading of weights. Triton's product has too few of them on their way, asks for none
        before its inputs are there, and leaves the activation to a kernel of its own (figures in
        docs/lab/quantised.md).

    Before::

        y = mllm.quantised_grouped_linear(x, order, blocks, gate_up, …, bias, "mxfp4", 32, k, True, False, B)
        g, u = clamp(y[..., ::2], None, L), clamp(y[..., 1::2], -L, L); a = (u + 1) * (g * sigmoid(g * alpha))
        z = mllm.quantised_grouped_linear(a, order, blocks, down, …, bias, "mxfp4", 32, k, False, False, B)

    After::

        a = mllm.stream_expert_rows(x, order, blocks, gate_up, …, bias, k, True, True, alpha, L, False, B)
        z = mllm.stream_expert_rows(a, order, blocks, down, …, bias, k, False, False, 0, 0, True, B)

    Requires: variants by group_experts on a Hopper GPU in bfloat16, with blocks of one or 16 rows; inputs that 32
        divides, at most 3072. Other activations, other schemes and other sizes stay as they are.
    Preserves: the meaning. Sums are in float32 in another order than Triton's; the activation is rounded once.
    """

    name: ClassVar[str] = "stream_expert_rows"
    needs: ClassVar[tuple[str, ...]] = ("stream_expert_rows",)

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        if target.any_rows:
            return NO_VARIANTS
        return None if target.compiles_cuda else NO_CUDA_COMPILER

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        # Activations first: the linear that one is of goes with it.
        matches = sum(rewrite_pieces(gm, list(_variants(gm)), rewrite) for rewrite in (_stream_activated, _stream))
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _variants(gm: fx.GraphModule) -> Iterator[str]:
    return (variant for of_piece in gm.meta.get(VARIANTS, {}).values() for variant in of_piece.values())


def _stream_activated(graph: fx.Graph, node: fx.Node) -> bool:
    """Rewrites an activation with the linear that it is of."""
    found = match_clamped_swiglu(node)
    return found is not None and _replace(graph, node, found.pairs, (True, found.alpha, found.limit))


def _stream(graph: fx.Graph, node: fx.Node) -> bool:
    return _replace(graph, node, node, (False, 0.0, 0.0))


def _replace(graph: fx.Graph, node: fx.Node, linear: fx.Node, activation: tuple[bool, float, float]) -> bool:
    """Puts the kernel's op in the place of `node`, which is the linear or what is made of its outputs."""
    operands: Any = linear.args
    if not is_op(linear, "quantised_grouped_linear"):
        return False
    x, order, blocks, values, scales, zeros, bias, kind, _, num_chosen, of_tokens, is_gated, block = operands
    experts, rows, half = map(int, values.meta["val"].shape)
    is_bfloat16 = all(one.meta["val"].dtype == torch.bfloat16 for one in (x, bias) if one is not None)
    is_plain = kind == "mxfp4" and zeros is None and not is_gated
    if not (is_plain and is_bfloat16 and is_taken(experts, num_chosen, rows, 2 * half, block)):
        return False
    is_early = is_op(x, "stream_expert_rows") and x.args[1:3] == (order, blocks)
    weight = values, scales, bias, num_chosen, of_tokens
    replace_by_op(graph, node, op("stream_expert_rows"), x, order, blocks, *weight, *activation, is_early, block)
    return True
