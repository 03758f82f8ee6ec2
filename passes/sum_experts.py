"""Makes the weighted sum of each token's experts one kernel, in pieces for many tokens."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import ANY_ROWS, VARIANTS, GraphPass, PassResult
from mllm_compile.passes.match.experts import match_weighted_sum
from mllm_compile.passes.match.nodes import called_pieces, is_call, replace_by_op, rewrite_pieces
from mllm_compile.runtime.ops import op


class SumExperts(GraphPass):
    """Adds up experts' outputs by a kernel that reads each row as it is.

    Why: behind the tiles' kernels Inductor's took 2.5 ms for 8192 tokens of 8 experts and 2048 outputs on an H200,
        where the bytes take 0.07.

    Before::

        y = (rows * reshape(w, (-1, 1))).view(T, k, -1).sum(1).to(rows.dtype)

    After::

        y = mllm.sum_experts(rows, w)

    Requires: deduplicated pieces on CUDA that have variants for fewer tokens: in those Inductor's sum takes 1.5 µs,
        with the residual. With ANY_ROWS no piece has variants, and all are taken.
    Preserves: products are rounded where the model rounds them, and are added in float32 as torch adds them.
    """

    name: ClassVar[str] = "sum_experts"
    needs: ClassVar[tuple[str, ...]] = ("sum_experts",)

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        names = called_pieces(gm) if gm.meta.get(ANY_ROWS) else list(gm.meta.get(VARIANTS, {}))
        matches = rewrite_pieces(gm, names, _fuse)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _fuse(graph: fx.Graph, node: fx.Node) -> bool:
    operands = match_weighted_sum(node)
    if operands is None:
        return False
    last = _rounded(node, operands[0].meta["val"].dtype)
    if last is None:
        return False
    replace_by_op(graph, last, op("sum_experts"), *operands)
    return True


def _rounded(total: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    """The node that gives the sum in this dtype: the sum itself, or what alone reads it."""
    if total.meta["val"].dtype == dtype:
        return total
    (reader, *others) = total.users
    is_cast = is_call(reader, "to") and reader.meta["val"].dtype == dtype
    return reader if is_cast and not others else None
