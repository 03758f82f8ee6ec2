"""Makes the norm ahead of a linear of deterministic steps one kernel, with the sum that it is of."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

from torch import fx

from mllm_compile.passes.base import GraphPass, PassResult, PassTarget
from mllm_compile.passes.match.nodes import (
    are_alike,
    called_pieces,
    is_call,
    is_op,
    replace_by_op,
    replace_pair_by_op,
    rewrite_pieces,
)
from mllm_compile.passes.match.rms_norm import RMSNorm, match_rms_norm
from mllm_compile.passes.sum_in_one_order import SumInOneOrder
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.rms_norm_shapes import is_taken


class FuseAddNorm(GraphPass):
    """Puts `mllm.add_rms_norm` in the place of a residual's sum and its RMS norm, or `mllm.rms_norm` of a norm alone.

    Why: Inductor's kernel lets the linear behind it start when it has read its rows. This one lets it start at once, so
        that its weight comes while the linear ahead ends and the norm is computed.

    Before::

        y = residual + mllm.linear_in_one_order(a, down, None)
        h = norm_weight * to(y.to(f32) * rsqrt(mean(y.to(f32) ** 2) + eps))
        z = mllm.linear_in_one_order(h, weight, None)

    After::

        y, h = mllm.add_rms_norm(mllm.linear_in_one_order(a, down, None), residual, norm_weight, eps)
        z = mllm.linear_in_one_order(h, weight, None)

    Requires: linears by sum_in_one_order: others wait for all that is ahead of them.
    Preserves: the sum. A norm is rounded once, behind its weight, as by Inductor.
    """

    name: ClassVar[str] = "fuse_add_norm"
    needs: ClassVar[tuple[str, ...]] = ("add_rms_norm", "rms_norm")

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        return SumInOneOrder.obstacle(target)

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        matches = rewrite_pieces(gm, called_pieces(gm), _fuse)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _fuse(graph: fx.Graph, node: fx.Node) -> bool:
    norm = match_rms_norm(node)
    if norm is None or not _is_served(node, norm):
        return False
    parts = _parts_of_sum(norm.x)
    options = (norm.weight, norm.eps, *((True,) if norm.plus_one else ()))
    if parts is None:
        replace_by_op(graph, node, op("rms_norm"), norm.x, *options)
        return True
    replace_pair_by_op(graph, norm.x, node, op("add_rms_norm"), *parts, *options)
    return True


def _is_served(node: fx.Node, norm: RMSNorm) -> bool:
    """True for a norm of rows that the kernel takes, which a linear of this mode reads."""
    val, dtypes = norm.x.meta["val"], {one.meta["val"].dtype for one in (node, norm.x, norm.weight)}
    reads = any(is_op(user, "linear_in_one_order", "gated_linear_in_one_order") for user in node.users)
    return reads and len(dtypes) == 1 and is_taken(int(val.shape[-1]))


def _parts_of_sum(total: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two values of one shape and type whose sum it is."""
    if not is_call(total, operator.add):
        return None
    parts: Any = total.args
    if not all(isinstance(part, fx.Node) for part in parts):
        return None
    dtypes = {one.meta["val"].dtype for one in (total, *parts)}
    return parts if are_alike(*parts) and len(dtypes) == 1 else None
