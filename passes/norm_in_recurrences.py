"""Moves the gated norm of a recurrence's outputs into the recurrence."""

from __future__ import annotations

import math
import operator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx
from torch.nn import functional

from mllm_compile.passes.base import GraphPass, PassResult
from mllm_compile.passes.match.nodes import call, drop_dead_nodes, is_call, is_op, is_weight
from mllm_compile.passes.match.rms_norm import match_mean_square

_GATES: dict[Any, str] = {functional.silu: "silu", torch.sigmoid: "sigmoid"}
_Z, _NORM = 7, 8  # of gated_delta and ssd
_EPS, _GATE = 10, 11  # of gated_delta
_SSD_EPS, _SSD_GROUPS = 13, 14
_MOST_NUMBERS = 16384  # of a group that a block norms


class NormInRecurrences(GraphPass):
    """Lets a gated delta rule norm each head's output and multiply it by the gate z, and Mamba-2's scan multiply first
    and norm each group of heads.

    Why: the recurrence's op norms by a kernel that knows the requests' tokens. The kernel has z before the outputs, and
        lets the next linear start as soon as it has them (runtime/ops/states/gated_norm.py; figures in
        docs/lab/states.md).

    Before::

        out = gated_delta(q, k, v, g, beta, A_log, dt_bias, None, None, True, 0.0, "")
        y = norm_weight * to(out.to(f32) * rsqrt(mean(out.to(f32) ** 2, -1) + eps)); y = to(y * silu(z.to(f32)))

        gated = view(ssd(x, dt, A_log, B, C, D, dt_bias, None, None, …, 0.0, 1)) * silu(z.to(f32))
        y = to(norm_weight * view(gated * rsqrt(mean(gated ** 2, -1) + eps)))

    After::

        y = gated_delta(q, k, v, g, beta, A_log, dt_bias, z, norm_weight, True, eps, "silu")
        y = view(ssd(x, dt, A_log, B, C, D, dt_bias, z, norm_weight, …, eps, groups))

    Requires: a canonical graph. A rule's norm is over a head's width and its weight has that width; a scan's is over a
        token's numbers or equal parts of them, with a weight for all. Nothing else reads the outputs.
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
    if found is not None:
        z = _moved_ahead(graph, found.z, found.rule)
        if z is None:
            return False
        for place, value in ((_Z, z), (_NORM, found.weight), (_EPS, found.eps), (_GATE, found.gate)):
            found.rule.update_arg(place, value)
        node.replace_all_uses_with(found.x)
        return True
    of_groups = _match_of_groups(node)
    if of_groups is None:
        return False
    scan, z = of_groups.scan, _moved_ahead(graph, of_groups.z, of_groups.scan)
    if z is None:
        return False
    scan.update_arg(_Z, z)
    scan.update_arg(_NORM, of_groups.weight)
    scan.update_arg(_SSD_EPS, of_groups.eps)
    scan.update_arg(_SSD_GROUPS, of_groups.groups)
    scan.meta["val"] = torch.empty_like(scan.meta["val"], dtype=node.meta["val"].dtype)
    with graph.inserting_before(node):
        normed = scan if node.meta["val"].dim() == 2 else call(graph, operator.getitem, scan, None)
        node.replace_all_uses_with(call(graph, torch.flatten, normed, -2))
    return True


def _moved_ahead(graph: fx.Graph, z: Any, recurrence: fx.Node) -> fx.Node | None:
    """z as [T, H, P], ahead of the recurrence; None where it is of another shape, or made of the outputs."""
    found = _by_heads(z, recurrence)
    if found is None or not _come_ahead(graph, found, recurrence):
        return None
    with graph.inserting_before(recurrence):
        if found.meta["val"].dim() == 3 and found.meta["val"].shape[0] == 1:  # [1, T, H * P]
            found = call(graph, operator.getitem, found, 0)
            found = call(graph, torch.reshape, found, (-1, *recurrence.meta["val"].shape[1:]))
        elif found.meta["val"].dim() == 4:
            found = call(graph, operator.getitem, found, 0)
    return found


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


class _NormOfGroups(NamedTuple):
    scan: fx.Node  # Mamba-2's
    weight: fx.Node
    z: fx.Node
    eps: float
    groups: int


def _match_of_groups(node: Any) -> _NormOfGroups | None:
    """The norm of gated outputs of Mamba-2's scan whose result, of the model's type, is `node`."""
    if not is_call(node, "to") or not is_call(node.args[0], operator.mul):
        return None
    operands: Any = node.args[0].args
    for weight, scaled in (operands, operands[::-1]):
        weight, scaled = _unconverted(weight), _behind_views(_unconverted(scaled))
        if not is_weight(weight) or not is_call(scaled, operator.mul):
            continue
        factors: Any = scaled.args
        for gated, root in (factors, factors[::-1]):
            if not is_call(root, torch.rsqrt):
                continue
            eps, product = match_mean_square(root.args[0], gated), _behind_views(gated)
            if eps is not None and is_call(product, operator.mul):
                return _of_product(node, product, gated, weight, eps)
    return None


def _of_product(node: fx.Node, product: fx.Node, gated: fx.Node, weight: fx.Node, eps: float) -> _NormOfGroups | None:
    """The norm, where `product` is the outputs of a scan by silu(z), and `gated` its groups."""
    operands: Any = product.args
    for outputs, gate in (operands, operands[::-1]):
        scan = _behind_views(_unconverted(outputs))
        if not is_call(gate, functional.silu) or len(gate.args) != 1 or not is_op(scan, "ssd"):
            continue
        count, width = math.prod(scan.meta["val"].shape[1:]), gated.meta["val"].shape[-1]
        has_parts = width == count or gated.meta["val"].shape[-2:] == (count // width, width)
        is_whole = has_parts and tuple(weight.meta["val"].shape) == (count,) and node.meta["val"].shape[-1] == count
        is_free = scan.args[_Z] is None and width <= _MOST_NUMBERS and _alone_reads(node, scan)
        if is_whole and is_free and _is_rounded_for(node, scan):
            return _NormOfGroups(scan, weight, _unconverted(gate.args[0]), eps, count // width)
    return None


def _is_rounded_for(node: fx.Node, scan: fx.Node) -> bool:
    """True if `node` takes a float32 value to the type of a scan's input."""
    wide, x = node.args[0], scan.args[0]
    is_wide: bool = wide.meta["val"].dtype == torch.float32 and node.meta["val"].dtype == x.meta["val"].dtype  # type: ignore[union-attr]
    return is_wide


def _alone_reads(node: fx.Node, scan: fx.Node) -> bool:
    """True if whatever is made of a scan's outputs is made of `node`."""
    waiting, seen = [scan], {scan, node}
    while waiting:
        for user in waiting.pop().users:
            if user.op == "output":
                return False
            if user not in seen:
                seen.add(user)
                waiting.append(user)
    return True


def _behind_views(value: Any) -> Any:
    """The value that `value` is a view of, or itself."""
    while _is_view(value):
        value = value.args[0]
    return value


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


def _by_heads(z: Any, rule: fx.Node) -> fx.Node | None:
    """The nearest value that `z` is a view of and that is [1, T, Hv, Dv], [T, Hv, Dv] or [1, T, Hv * Dv], else None."""
    tokens, *heads = rule.meta["val"].shape
    shapes = ((1, tokens, *heads), (tokens, *heads), (1, tokens, heads[0] * heads[1]))
    while True:
        if _shape(z) in map(str, shapes):
            found: fx.Node = z
            return found
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
