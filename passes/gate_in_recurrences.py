"""Lets recurrences make their own gates of what projections give."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import fx
from torch.nn import functional

from mllm_compile.passes.base import GraphPass, PassResult
from mllm_compile.passes.match.nodes import call, drop_dead_nodes, is_call, is_op, is_weight

_SOFTPLUS = (torch._C._nn.softplus, functional.softplus)
# Op → the place of A among its arguments, and of the setting that says that it stands for -exp(A).
_RATES = {"ssd": (2, 12), "selective_scan": (2, 9)}
_TOKEN_DIMS = 3  # a batch of one, tokens, heads
_EXACT = (torch.float32, torch.float16, torch.bfloat16)  # types whose numbers float32 has
_GATE, _BETA, _A_LOG, _DT_BIAS = 3, 4, 5, 6  # of gated_delta


class GateInRecurrences(GraphPass):
    """Moves the making of gates into the recurrences that read them.

    Why: between a convolution and its recurrence a model computes a few numbers a head, by a kernel of its own in every
        layer of every step. The recurrence's kernel computes them on its way: what is left between the two are views.

    Before::

        g = -exp(A_log.float()) * softplus(a.float() + dt_bias)
        out = gated_delta(q, k, v, g[0], sigmoid(b)[0], None, None, True)
        y = ssd(x, dt, -exp(A_log.float()), B, C, D, dt_bias, None, None, True, 0.0, None, False)

    After::

        out = gated_delta(q, k, v, a[0], b[0], A_log, dt_bias, True)
        y = ssd(x, dt, A_log, B, C, D, dt_bias, None, None, True, 0.0, None, True)

    Requires: a canonical graph.
    Preserves: every value in float32; in 16 bits beta is not rounded.
    """

    name: ClassVar[str] = "gate_in_recurrences"

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        matches = sum(_rewrite(gm.graph, node) for node in list(gm.graph.nodes))
        drop_dead_nodes(gm)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _rewrite(graph: fx.Graph, node: fx.Node) -> bool:
    if is_op(node, "gated_delta"):
        return _take_gates(graph, node)
    for name, (place, setting) in _RATES.items():
        if is_op(node, name):
            weight = _of_negative_exponential(node.args[place])
            if weight is None or node.args[setting]:
                return False
            node.update_arg(place, weight)
            node.update_arg(setting, True)
            return True
    return False


def _take_gates(graph: fx.Graph, node: fx.Node) -> bool:
    gate, beta = _first_row(node.args[_GATE]), _first_row(node.args[_BETA])
    if node.args[_A_LOG] is not None or not _is(gate, operator.mul) or not _is(beta, torch.sigmoid):
        return False
    for rate, size in (gate.args, gate.args[::-1]):
        a_log, (given, dt_bias) = _of_negative_exponential(rate), _of_softplus(size)
        if a_log is not None and given is not None:
            with graph.inserting_before(node):
                node.update_arg(_GATE, call(graph, operator.getitem, given, 0))
                node.update_arg(_BETA, call(graph, operator.getitem, beta.args[0], 0))
            node.update_arg(_A_LOG, a_log)
            node.update_arg(_DT_BIAS, dt_bias)
            return True
    return False


def _is(value: Any, *targets: Callable[..., Any] | str) -> bool:
    """is_call; failed look-ups are remembered too."""
    return is_call(value, *targets)


def _first_row(value: Any) -> Any:
    """The batch of one whose only row is `value`, or None."""
    return value.args[0] if _is(value, operator.getitem) and value.args[1] == 0 else None


def _of_negative_exponential(value: Any) -> fx.Node | None:
    """The weight x of -exp(x) in float32."""
    if not _is(value, operator.neg) or not _is(value.args[0], torch.exp, "exp") or not _is_float32(value):
        return None
    weight = _as_it_was(value.args[0].args[0])
    return weight if is_weight(weight) else None


def _of_softplus(value: Any) -> tuple[Any, Any]:
    """x [1, T, H] and the weight b of softplus(x + b) in float32, or (None, None)."""
    if not _is(value, *_SOFTPLUS) or len(value.args) != 1 or value.kwargs:
        return None, None
    total = value.args[0]
    if not _is(total, operator.add) or not _is_float32(total):
        return None, None
    for one, other in (total.args, total.args[::-1]):
        given, weight = _as_it_was(one), _as_it_was(other)
        if is_weight(weight) and isinstance(given, fx.Node) and given.meta["val"].dim() == _TOKEN_DIMS:
            return given, weight
    return None, None


def _is_float32(node: fx.Node) -> bool:
    is_wide: bool = node.meta["val"].dtype == torch.float32
    return is_wide


def _as_it_was(value: Any) -> Any:
    """The value ahead of its conversion to float32, which a kernel does itself; one of more bits stays."""
    is_converted = _is(value, "to") and _is_float32(value) and value.args[0].meta["val"].dtype in _EXACT
    return value.args[0] if is_converted else value
