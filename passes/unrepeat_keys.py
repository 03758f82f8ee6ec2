"""Gives a gated delta rule its queries and keys once for all value heads that share them."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

from torch import fx

from mllm_compile.passes.base import GraphPass, PassResult
from mllm_compile.passes.match.nodes import call, drop_dead_nodes, is_call, is_op

_HEADS = 2  # of [1, T, heads, width]


class UnrepeatKeys(GraphPass):
    """Takes away the copies of queries and keys that some releases of Transformers make for each value head.

    Why: the rule's kernels find the key head of a value head; copies cost a kernel each, and as many times the reads.

    Before::

        q = repeat_interleave(query, 2, dim=2); k = repeat_interleave(key, 2, dim=2)
        out = gated_delta(q[0], k[0], v, …)

    After::

        out = gated_delta(query[0], key[0], v, …)

    Requires: a canonical graph; both are repeated as often.
    Preserves: every value bitwise.
    """

    name: ClassVar[str] = "unrepeat_keys"

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        matches = sum(_rewrite(gm.graph, node) for node in list(gm.graph.nodes))
        drop_dead_nodes(gm)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _rewrite(graph: fx.Graph, node: fx.Node) -> bool:
    if not is_op(node, "gated_delta"):
        return False
    q, k = (_repeated(value) for value in node.args[:2])
    if q is None or k is None or q[1] != k[1]:
        return False
    with graph.inserting_before(node):
        for place, (source, _) in enumerate((q, k)):
            node.update_arg(place, call(graph, operator.getitem, source, 0))
    return True


def _repeated(value: Any) -> tuple[fx.Node, int] | None:
    """(x, count) of x.repeat_interleave(count, dim=2)[0]."""
    if not is_call(value, operator.getitem) or value.args[1] != 0:
        return None
    node: Any = value.args[0]
    if not is_call(node, "repeat_interleave"):
        return None
    source: Any
    source, count, *dim = node.args
    is_of_heads = [*dim, *node.kwargs.values()] == [_HEADS] and source.meta["val"].dim() == _HEADS + 2
    return (source, count) if is_of_heads and isinstance(count, int) else None
