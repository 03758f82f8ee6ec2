"""Makes gate_up and its activation one kernel on Hopper, in pieces for many tokens."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import ANY_ROWS, NO_CUDA_COMPILER, VARIANTS, GraphPass, PassResult, PassTarget
from mllm_compile.passes.launch_lora import shrunk_of
from mllm_compile.passes.match.linear import match_adapted_linear, match_linear, match_silu_mul
from mllm_compile.passes.match.nodes import call, called_pieces, replace_by_op, rewrite_pieces
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.gated_linear.kernel import is_taken, takes_adapters
from mllm_compile.runtime.ops.stream_linear.shapes import MAX_LARGE_TOKENS


class FuseGatedLinear(GraphPass):
    """Activates a matrix product's sums before they leave the registers.

    Why: gates and ups are neither written nor read again. That saves up to 8 % of the time of both for 512 to 8192
        tokens of Qwen3-8B, and 7 to 24 % with 0.6B (figures in docs/lab/performance.md).

    Before::

        gate, up = split(linear(x, w), [n, n], dim=-1); y = silu(gate) * up

    After::

        y = mllm.gated_linear(x, w)

    With mllm.add_lora of both halves behind the linear it is mllm.gated_linear_lora, of what mllm.lora_shrink gives.

    Requires: deduplicated pieces on a Hopper GPU in bfloat16, with a variant by stream_linears for up to 208 tokens at
        least, as the kernel's tiles are of 256; or with ANY_ROWS, as it computes a token alike in any company.
    Preserves: gates, ups and silu are rounded, as in the model, then the product.
    """

    name: ClassVar[str] = "fuse_gated_linear"
    needs: ClassVar[tuple[str, ...]] = ("gated_linear", "gated_linear_lora", "lora_shrink")

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        return None if target.compiles_cuda else NO_CUDA_COMPILER

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        variants = gm.meta.get(VARIANTS, {})
        names = [name for name in variants if max(variants[name]) >= MAX_LARGE_TOKENS]
        matches = rewrite_pieces(gm, called_pieces(gm) if gm.meta.get(ANY_ROWS) else names, _fuse)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _fuse(graph: fx.Graph, node: fx.Node) -> bool:
    product = match_silu_mul(node)
    if product is None or len(product.users) != 1:
        return False
    linear = match_linear(product) or match_adapted_linear(product)
    if linear is None or not is_taken(*linear.shape) or linear.weight.meta["val"].dtype != torch.bfloat16:
        return False
    if not linear.adapters:
        replace_by_op(graph, node, op("gated_linear"), linear.source, linear.weight)
        return True
    a, b, slots, *parts, _ = linear.adapters
    if (
        not takes_adapters(linear.shape[0], int(b.meta["val"].shape[2]), *parts)
        or a.meta["val"].dtype != torch.bfloat16
    ):
        return False
    with graph.inserting_before(node):
        shrunk = call(graph, torch.squeeze, shrunk_of(graph, linear.source, a, slots, False, False), 0)
    replace_by_op(graph, node, op("gated_linear_lora"), linear.source, linear.weight, shrunk, b, slots)
    return True
