"""Adds a variant of each piece for one token: linears, norms, activations and residuals in few kernels."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import fx

from mllm_compile.passes.base import NO_VARIANTS, GraphPass, PassResult, PassTarget
from mllm_compile.passes.match.linear import match_linear, match_residual, match_silu_mul
from mllm_compile.passes.match.nodes import replace_by_op
from mllm_compile.passes.match.rms_norm import match_rms_norm
from mllm_compile.passes.variants import add_variants, copy_of
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.single_token_shapes import is_taken


class FuseSingleToken(GraphPass):
    """Makes pieces for one token: a linear takes its norm, its gate or its residual with it.

    Why: at one token a decode step is launches and reads of weights. cuBLAS' matrix-vector kernels run at a third of
        the memory's speed for small weights. Norm, activation and residual cost a launch each (figures in
        runtime/ops/single_token.py).

    Before::

        h = norm_weight * to(x.to(f32) * rsqrt(mean(x.to(f32) ** 2) + eps)); y = linear(h, weight)
        gate, up = split(linear(h, gate_up)); a = silu(gate) * up; y = residual + linear(a, down)

    After::

        y = mllm.norm_linear(x, norm_weight, weight, eps)
        a = mllm.norm_gated_linear(x, norm_weight, gate_up, eps); y = mllm.linear_residual(a, down, residual)

    Requires: deduplicated pieces on CUDA in bfloat16 or float16. The pieces for any number of tokens stay as they are;
        the new variants are submodules named in gm.meta[VARIANTS], and are run when a step has one token.
    Preserves: roundings are where the model has them; sums are in float32 in another order than cuBLAS'.
    """

    name: ClassVar[str] = "fuse_single_token"
    needs: ClassVar[tuple[str, ...]] = ("norm_linear", "norm_gated_linear", "linear_residual")

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        return NO_VARIANTS if target.any_rows else None

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        matches = add_variants(gm, 1, "_one_token", single_token_variant)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def single_token_variant(piece: fx.GraphModule) -> fx.GraphModule | None:
    """The piece with its linears fused, or None where nothing matches."""
    variant = copy_of(piece)
    graph = variant.graph
    # The gated variant first: its linear reads a norm too.
    fused = sum(fuse(graph, node) for fuse in (_fuse_gated, _fuse_norm, _fuse_residual) for node in list(graph.nodes))
    graph.eliminate_dead_code()
    variant.recompile()
    return variant if fused else None


def _fuse_norm(graph: fx.Graph, node: fx.Node) -> bool:
    linear = match_linear(node)
    norm = None if linear is None else match_rms_norm(linear.source)
    if linear is None or norm is None or not is_taken(*linear.shape):
        return False
    _replace(graph, node, "norm_linear", norm.x, norm.weight, linear.weight, norm.eps, norm.plus_one)
    return True


def _fuse_gated(graph: fx.Graph, node: fx.Node) -> bool:
    """silu(gate) * up over the two halves of one linear of a norm."""
    linear = match_linear(match_silu_mul(node))
    norm = None if linear is None else match_rms_norm(linear.source)
    if linear is None or norm is None or not is_taken(linear.shape[0] // 2, linear.shape[1]):
        return False
    _replace(graph, node, "norm_gated_linear", norm.x, norm.weight, linear.weight, norm.eps, norm.plus_one)
    return True


def _fuse_residual(graph: fx.Graph, node: fx.Node) -> bool:
    for linear, residual in match_residual(node):
        if is_taken(*linear.shape):
            _replace(graph, node, "linear_residual", linear.source, linear.weight, residual)
            return True
    return False


def _replace(graph: fx.Graph, node: fx.Node, op_name: str, *args: Any) -> None:
    replace_by_op(graph, node, op(op_name), *args)
