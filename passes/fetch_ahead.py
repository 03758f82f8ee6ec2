"""Lets experts ask the L2 cache for weights of the kernels behind them, while the memory idles."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

from torch import fx

from mllm_compile.passes.base import NO_CUDA_COMPILER, SMALL_FORMS, GraphPass, PassResult, PassTarget
from mllm_compile.passes.match.nodes import is_call, is_op, rewrite_pieces

_MOST_BYTES = 28 << 20  # of the L2 cache, of which an H100 and an H200 have 50 MiB
_DOWN, _AHEAD = 4, 5  # the operands' places


class FetchAhead(GraphPass):
    """Gives `mllm.stream_expert_up` the weights of its experts' second linear and of the linear behind that.

    Why: from the end of attention's linear until a router's scores are there and the choice is made no weight can be
        read: 3 to 4 µs a layer, in which an H200 reads 15 MB. Likewise from the time when gate_up has asked for all
        that it reads until down's blocks are there.

    Before::

        a = mllm.stream_expert_up(h, gate_up, squares, eps, None, None, scores, …)
        z, h, squares = mllm.stream_expert_down_norm(a, down, …); q = mllm.stream_linear(h, qkv, squares, eps, False)

    After::

        a = mllm.stream_expert_up(h, gate_up, squares, eps, down, qkv, scores, …)

    Requires: forms by stream_experts. A linear whose weight would fill more than half of the cache is left alone.
    Preserves: every number.
    """

    name: ClassVar[str] = "fetch_ahead"
    needs: ClassVar[tuple[str, ...]] = ("stream_expert_up",)

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        return None if target.compiles_cuda else NO_CUDA_COMPILER

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        forms = [form for of_piece in gm.meta.get(SMALL_FORMS, {}).values() for form in of_piece.values()]
        return PassResult(gm, rewrite_pieces(gm, forms, _give_weights), before, len(gm.graph.nodes))


def _give_weights(graph: fx.Graph, node: fx.Node) -> bool:
    if not is_op(node, "stream_expert_down", "stream_expert_down_norm"):
        return False
    up: Any = node.args[0]
    if not is_op(up, "stream_expert_up") or up.args[_DOWN] is not None:
        return False
    up.update_arg(_DOWN, node.args[1])
    up.update_arg(_AHEAD, _weight_behind(node))
    return True


def _weight_behind(node: fx.Node) -> Any:
    """The weight of the one linear of ours that reads the norm of what experts give, if the cache has room for it."""
    weights: list[Any] = [
        reader.args[1]
        for part in node.users
        for reader in part.users
        if is_call(part, operator.getitem) and is_op(reader, "stream_linear") and reader.args[0] is part
    ]
    if len(weights) != 1 or weights[0].op != "placeholder":
        return None
    val = weights[0].meta["val"]
    return weights[0] if val.numel() * val.element_size() <= _MOST_BYTES else None
