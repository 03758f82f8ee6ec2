"""Lets attention over latents choose: to be computed over them as they are, or over keys and values made of them."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import GraphPass, PassResult, PassTarget
from mllm_compile.passes.match.nodes import call, drop_dead_nodes, is_attention, is_call, is_weight


class ExpandLatents(GraphPass):
    """Moves the products that `absorb_latents` has put around attention over latents into attention.

    Why: over latents a pair of tokens takes rank + r + rank multiplications a head, over its keys and values n + r + v:
        for DeepSeek-V3 1088 and 320. Decodes read latents, which are 71 times fewer bytes. A long prompt makes keys and
        values of all latents that it sees, once, and has neither of the products around. A step holds both.

    Before::

        q = cat((bmm(q[.., :n], weight[:, :n]), q[.., n:]), -1)                 # [T, H, rank + r]
        out = bmm(mllm.attention(q, k, k, None, 0.07, 0.0, -1, "", None, 0, rank), weight[:, n:]ᵀ)

    After::

        out = mllm.attention(q, k, k, None, 0.07, 0.0, -1, "", None, 0, rank, weight)   # [T, H, n + r] → [T, H, v]

    Requires: what absorb_latents writes, in every layer. The weight is a layer's now, and no piece reads it.
    Preserves: every value, except the order of sums and rounding.
    """

    name: ClassVar[str] = "expand_latents"

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        if target.deterministic:
            return "runtime.deterministic has one variant of attention for a prompt, however it is cut: over latents"
        return None

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        found = [_match(node) for node in gm.graph.nodes if is_attention(node)]
        if not all(found):
            return PassResult(gm, 0, before, before)
        for one in found:
            if one is not None:
                _move_in(gm.graph, one)
        drop_dead_nodes(gm)
        return PassResult(gm, len(found), before, len(gm.graph.nodes))


@dataclass(frozen=True)
class _Absorbed:
    """Attention over latents with the products around it: q [T, H, n + r] as it was, and the result [T, H, v]."""

    attention: fx.Node
    q: fx.Node
    weight: fx.Node
    result: fx.Node


def _match(attention: fx.Node) -> _Absorbed | None:
    if len(attention.args) != 11 or not is_call(wide := attention.args[0], torch.cat):  # all but the weight
        return None
    parts: Any = wide.args[0]
    by_head, q_rope = parts
    of_keys = _product(by_head)
    if of_keys is None:
        return None
    q_keys, for_keys = of_keys
    q = _source_of_part(q_keys, 0)
    of_heads = _source_of_part(for_keys, 0)
    if q is None or q is not _source_of_part(q_rope, 1) or not is_call(of_heads, torch.reshape):
        return None
    result = attention
    for target in (torch.transpose, torch.bmm, torch.transpose, "contiguous"):
        readers = list(result.users)
        if len(readers) != 1 or not is_call(readers[0], target):
            return None
        result = readers[0]
    of_values = _product(result.args[0])
    if of_values is None or not is_call(for_values := of_values[1], torch.transpose):
        return None
    weight: Any = of_heads.args[0]
    if _source_of_part(for_values.args[0], 1) is not of_heads or not is_weight(weight):
        return None
    return _Absorbed(attention, q, weight, result)


def _product(node: Any) -> tuple[Any, Any] | None:
    """x [T, H, a] and w [H, a, b] of x · w [T, H, b]."""
    if not is_call(node, torch.transpose) or not is_call(product := node.args[0], torch.bmm):
        return None
    x, w = product.args
    return (x.args[0], w) if is_call(x, torch.transpose) else None


def _source_of_part(node: Any, index: int) -> Any:
    """The value that `node` is part `index` of two of; None: it is no such part."""
    if not is_call(node, operator.getitem) or node.args[1] != index or not is_call(split := node.args[0], torch.split):
        return None
    return split.args[0] if len(split.args[1]) == 2 else None  # type: ignore[arg-type]


def _move_in(graph: fx.Graph, found: _Absorbed) -> None:
    attention = found.attention
    with graph.inserting_before(attention):
        out = call(graph, attention.target, found.q, *attention.args[1:], found.weight)  # type: ignore[arg-type]
    out.meta = attention.meta | {"val": out.meta["val"]}  # it says which module attends
    found.result.replace_all_uses_with(out)
