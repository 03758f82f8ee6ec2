"""Moves the gated norm of a gated delta rule's outputs into the rule."""

from __future__ import annotations

import operator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx
from torch.nn import functional

from mllm_compile.passes.base import GraphPass, PassResult
from mllm_compile.passes.match.nodes import call, drop_dead_nodes, is_call, is_op, is_weight
from mllm_compile.passes.match.rms_norm import match_mean_square

_GATES: dict[Any, str] = {functional.silu: "silu", torch.sigmoid: "sigmoid"}
_Z, _NORM, _EPS, _GATE = 7, 8, 10, 11  # of gated_delta


class NormInRecurrences(GraphPass):
    """Lets a gated delta rule norm each head's output and multiply it by the gate z.

    Why: the rule's op norms in place, by a kernel that knows which tokens are requests', of decodes a token a warp
        (runtime/ops/states/gated_norm.py; figures in docs/state.md).

    Before::

        out = gated_delta(q, k, v, g, beta, A_log, dt_bias, None, None, True, 0.0, "")
        y = norm_weight * to(out.to(f32) * rsqrt(mean(out.to(f32) ** 2, -1) + eps)); y = to(y * silu(z.to(f32)))

    After::

        y = gated_delta(q, k, v, g, beta, A_log, dt_bias, z, norm_weight, True, eps, "silu")

    Requires: a canonical graph; a norm over a head's width whose weight has that width; nobody else reads the outputs.
    Preserves: every value in float32; in 16 bits the outputs are rounded once, behind the gate.
    """

    name: ClassVar[str] = "norm_in_recurrences"

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        matches = sum(_rewrite(gm.graph, node) for node in list(gm.graph.nodes))
        drop_dead_nodes(gm)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


class _GatedNorm(NamedTuple):
    rule: fx.Node  # the gated delta rule
    x: fx.Node  # a view of its outputs
    weight: fx.Node
    z: fx.Node
    eps: float
    gate: str


def _rewrite(graph: fx.Graph, node: fx.Node) -> bool:
    found = _match(node)
    if found is None:
        return False
    z = _by_heads(found.z, found.rule)
    if z is None or not _come_ahead(graph, z, found.rule):
        return False
    with graph.inserting_before(found.rule):
        if z.meta["val"].dim() == 3 and z.meta["val"].shape[0] == 1:  # [1, T, Hv * Dv]
            z = call(graph, operator.getitem, z, 0)
            z = call(graph, torch.reshape, z, (-1, *found.rule.meta["val"].shape[1:]))
        elif z.meta["val"].dim() == 4:
            z = call(graph, operator.getitem, z, 0)
    for place, value in ((_Z, z), (_NORM, found.weight), (_EPS, found.eps), (_GATE, found.gate)):
        found.rule.update_arg(place, value)
    node.replace_all_uses_with(found.x)
    return True


def _match(node: Any) -> _GatedNorm | None:
    """The norm whose gated result, of the outputs' type, is `node`."""
    if not is_call(node, "to") or not is_call(node.args[0], operator.mul):
        return None
    factors: Any = node.args[0].args
    for normed, gate in (factors, factors[::-1]):
        if not is_call(gate, *_GATES) or len(gate.args) != 1 or not is_call(normed, operator.mul):
            continue
        operands: Any = normed.args
        for weight, scaled in (operands, operands[::-1]):
            weight, found = _unconverted(weight), _match_scaled(_unconverted(scaled))
            if found is None or not is_weight(weight):
                continue
            x, eps = found
            rule = _rule_behind(x)
            if rule is None or not _fits(rule, x, weight, node):
                continue
            act: Any = gate.target
            return _GatedNorm(rule, x, weight, _unconverted(gate.args[0]), eps, _GATES[act])
    return None


def _match_scaled(node: Any) -> tuple[Any, float] | None:
    """x and eps of x.float() * rsqrt(mean(x.float() ** 2, -1) + eps)."""
    if not is_call(node, operator.mul):
        return None
    factors: Any = node.args
    for wide, root in (factors, factors[::-1]):
        if is_call(root, torch.rsqrt) and is_call(wide, "to") and len(wide.users) == 2:
            eps = match_mean_square(root.args[0], wide)
            if eps is not None and wide.meta["val"].dtype == torch.float32:
                return wide.args[0], eps
    return None


def _rule_behind(x: Any) -> fx.Node | None:
    """The gated delta rule that `x` is a view of, which nobody else reads, and which has no norm yet."""
    while len(x.users) == 1:
        if is_op(x, "gated_delta"):
            return x if x.args[_Z] is None else None
        if not _is_view(x):
            return None
        x = x.args[0]
    return None


def _fits(rule: fx.Node, x: fx.Node, weight: fx.Node, result: fx.Node) -> bool:
    """True if the norm is over a head's outputs, and its result is as they are."""
    width, val = rule.meta["val"].shape[-1], x.meta["val"]
    is_of_heads = val.shape[-1] == width and tuple(weight.meta["val"].shape) == (width,)
    return is_of_heads and _shape(result) == _shape(x) and result.meta["val"].dtype == val.dtype


def _by_heads(z: Any, rule: fx.Node) -> Any:
    """The nearest value that `z` is a view of and that is [1, T, Hv, Dv], [T, Hv, Dv] or [1, T, Hv * Dv], else None."""
    tokens, *heads = rule.meta["val"].shape
    shapes = ((1, tokens, *heads), (tokens, *heads), (1, tokens, heads[0] * heads[1]))
    while True:
        if _shape(z) in map(str, shapes):
            return z
        if not _is_view(z):
            return None
        z = z.args[0]


def _shape(node: fx.Node) -> str:
    """The shape as text: whether sizes that depend on T are equal is not known."""
    return str(tuple(node.meta["val"].shape))


def _is_view(node: Any) -> bool:
    """True for a call that keeps its operand's numbers in their order."""
    if is_call(node, operator.getitem):
        return node.args[1] is None
    return is_call(node, torch.reshape, "view", torch.flatten, torch.unsqueeze)


def _unconverted(value: Any) -> Any:
    """The value ahead of a change of its type."""
    return value.args[0] if is_call(value, "to") else value


def _come_ahead(graph: fx.Graph, value: fx.Node, rule: fx.Node) -> bool:
    """Moves what `value` is made of ahead of the rule; False where it is made of the rule's outputs."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    behind: set[fx.Node] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if node is rule:
            return False
        if places[node] > places[rule] and node not in behind:
            behind.add(node)
            waiting += node.all_input_nodes
    for node in sorted(behind, key=places.__getitem__):
        rule.prepend(node)
    return True
