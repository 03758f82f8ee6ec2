"""Gives a sum over ranks the residual and the norm behind it, as one kernel."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import NO_CUDA_COMPILER, GraphPass, PassResult, PassTarget
from mllm_compile.passes.match import nodes
from mllm_compile.passes.match.nodes import called_pieces, is_call, is_op, replace_pair_by_op, rewrite_pieces
from mllm_compile.passes.match.rms_norm import RMSNorm, match_rms_norm
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.ranks.shapes import is_normed


class FuseRankSums(GraphPass):
    """Puts `mllm.all_reduce_residual_norm` in the place of a sum over ranks, residual and RMS norm.

    Why: a rank that has the numbers of others in its registers adds and norms them at once. Alone, residual and norm
        are one more kernel a sum, and of many tokens a further reading and writing of all of them.

    Before::

        y = residual + mllm.all_reduce(linear(a, down))
        h = norm_weight * to(y.to(f32) * rsqrt(mean(y.to(f32) ** 2) + eps)); z = linear(h, weight)

    After::

        y, h = mllm.all_reduce_residual_norm(linear(a, down), residual, norm_weight, eps)
        z = linear(h, weight)

    Requires: deduplicated pieces of several ranks on a Hopper GPU in bfloat16. Rows divide into chunks of eight,
        and norms are times their weight, not 1 + their weight.
        Ahead of all passes that add variants, which get it with the piece.
    Preserves: the norm's roundings; the sum and the residual are rounded once, not twice.
    """

    name: ClassVar[str] = "fuse_rank_sums"
    needs: ClassVar[tuple[str, ...]] = ("all_reduce_residual_norm",)

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        if target.num_ranks == 1:
            return "runtime.tensor_parallel_size is 1"
        return None if target.compiles_cuda else NO_CUDA_COMPILER

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        matches = rewrite_pieces(gm, called_pieces(gm), _fuse)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _fuse(graph: fx.Graph, node: fx.Node) -> bool:
    norm = match_rms_norm(node)
    found = None if norm is None else _match(norm)
    if norm is None or found is None:
        return False
    part, residual = found
    operands = (part, residual, norm.weight, norm.eps)
    replace_pair_by_op(graph, norm.x, node, op("all_reduce_residual_norm"), *operands)
    return True


def _match(norm: RMSNorm) -> tuple[fx.Node, fx.Node] | None:
    """The rank's part of the sum, and the residual."""
    total, val = norm.x, norm.x.meta["val"]
    is_ours = (
        val.device.type == nodes.KERNEL_DEVICE_TYPE and val.dtype == torch.bfloat16 and is_normed(int(val.shape[-1]))
    )
    if not is_call(total, operator.add) or not is_ours or norm.plus_one or norm.weight.meta["val"].dtype != val.dtype:
        return None
    operands: Any = total.args
    for reduced, residual in (operands, operands[::-1]):
        if not is_op(reduced, "all_reduce") or len(reduced.users) != 1 or not isinstance(residual, fx.Node):
            continue
        other = residual.meta["val"]
        if other.shape == reduced.meta["val"].shape == val.shape and other.dtype == val.dtype:
            return reduced.args[0], residual  # type: ignore[return-value]
    return None
