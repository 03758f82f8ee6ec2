"""Recognises the linears of a piece that kernels of ours take, with what is around them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from mllm_compile.passes.match.nodes import (
    LINEAR,
    are_alike,
    is_call,
    is_op,
    is_symbolic,
    linear_operands,
    takes_kernels,
)
from mllm_compile.passes.match.quantised import QuantisedLinear, match_quantised_linear
from mllm_compile.passes.match.rms_norm import match_rms_norm


@dataclass(frozen=True)
class Linear:
    """source · weightᵀ, and a bias where there is one.

    Attributes:
        weight: [N, K], or the values of a quantised one.
        quantised: what the call of a quantised weight says; None: it is a plain one.
        adapters: what mllm.add_lora adds to it by, behind its two inputs, and that slots may not be read early; then
            `node` is that.
    """

    node: fx.Node
    source: fx.Node
    weight: fx.Node
    bias: fx.Node | None = None
    quantised: QuantisedLinear | None = None
    adapters: tuple[Any, ...] = ()

    @property
    def operands(self) -> tuple[Any, ...]:
        """The tensors that the weight is, and adapters of it."""
        return (self.weight, *self.adapters) if self.quantised is None else self.quantised.tensors

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of the weight."""
        rows = self.node.meta["val"].shape[-1]
        return int(rows), int(self.source.meta["val"].shape[-1])


def is_of_step(linear: fx.Node) -> bool:
    """True for a linear of a step's own tokens; several ranks' tokens are too many for a variant."""
    rows = linear.meta["val"].shape[:-1]
    return all(size.node.expr.is_symbol for size in rows if is_symbolic(size))


def match_linear(node: object, takes_bias: bool = False) -> Linear | None:
    """A linear in a type that the kernels take, without a bias unless `takes_bias`."""
    if not is_call(node, LINEAR) or not is_of_step(node):
        return None
    source, weight, bias = linear_operands(node)
    if weight.op != "placeholder" or not takes_kernels(weight):
        return None
    if bias is not None and not (takes_bias and bias.op == "placeholder"):
        return None
    return Linear(node, source, weight, bias)


def match_adapted_linear(node: object) -> Linear | None:
    """A plain linear with what adapters add to it, where nothing else reads it."""
    if not isinstance(node, fx.Node) or not is_op(node, "add_lora"):
        return None
    product, source, *adapters = node.args
    linear = match_linear(product)
    if linear is None or linear.source is not source or len(linear.node.users) != 1:
        return None
    return Linear(node, linear.source, linear.weight, adapters=(*adapters, False))


def match_quantised_as_linear(node: object, takes_bias: bool = False) -> Linear | None:
    """A linear of a quantised weight, whose input is in a type that the kernels take, without a bias unless
    `takes_bias`."""
    found = match_quantised_linear(node)
    if not isinstance(node, fx.Node) or found is None or not is_of_step(node) or not takes_kernels(found.source):
        return None
    if any(tensor is not None and tensor.op != "placeholder" for tensor in found.tensors):
        return None
    if found.bias is not None and not (takes_bias and found.bias.op == "placeholder"):
        return None
    return Linear(node, found.source, found.values, found.bias, found)


def match_silu_mul(node: fx.Node) -> fx.Node | None:
    """silu(gate) * up over the two halves of one value, gate first: that value."""
    if not is_call(node, operator.mul):
        return None
    silu, up = node.args
    if not is_call(silu, functional.silu):
        silu, up = up, silu
    if not is_call(silu, functional.silu) or len(silu.users) != 1:
        return None
    gate: Any = silu.args[0]
    if not (is_call(gate, operator.getitem) and is_call(up, operator.getitem) and gate.args[0] is up.args[0]):
        return None
    halves: Any = gate.args[0]
    if (gate.args[1], up.args[1]) != (0, 1) or len(halves.users) != 2:
        return None
    return halves.args[0] if _is_in_halves(halves) else None


@dataclass(frozen=True)
class ClampedSwiglu:
    """g · sigmoid(alpha · g) · (u + 1) of neighbours g and u of `pairs`; g is at most `limit`, u within ± `limit`."""

    pairs: fx.Node
    alpha: float
    limit: float


def match_clamped_swiglu(node: object) -> ClampedSwiglu | None:
    """The activation that ends at `node`, as gpt-oss has it, where nothing else reads what is between."""
    for more, glu in _products(node):
        for ups, one in _products(more, operator.add):
            for gates, sigmoid in _products(glu):
                scaled: Any = sigmoid.args[0] if is_call(sigmoid, torch.sigmoid) else None
                if one != 1 or not is_call(scaled, operator.mul) or scaled.args[0] is not gates:
                    continue
                between = {more: 1, glu: 1, sigmoid: 1, scaled: 1, gates: 2, ups: 1}
                found = _clamped_pairs(gates, ups)
                if found is None or any(len(value.users) != users for value, users in between.items()):
                    continue
                pairs, limit = found
                alpha: Any = scaled.args[1]
                return ClampedSwiglu(pairs, float(alpha), limit) if isinstance(alpha, int | float) else None
    return None


def _products(node: object, target: Callable[..., Any] = operator.mul) -> Iterator[tuple[Any, Any]]:
    """Both operands of a call of `target`, in either order."""
    if is_call(node, target):
        first, second = node.args
        yield first, second
        yield second, first


def _clamped_pairs(gates: Any, ups: Any) -> tuple[fx.Node, float] | None:
    """The value that has gates and ups as neighbours, and their limit."""
    if not (is_call(gates, torch.clamp) and is_call(ups, torch.clamp)):
        return None
    gate, *of_gates = gates.args
    up, *of_ups = ups.args
    limit: Any = of_gates[-1]
    if not isinstance(limit, int | float) or limit <= 0 or of_gates != [None, limit] or of_ups != [-limit, limit]:
        return None
    if not (is_call(gate, operator.getitem) and is_call(up, operator.getitem) and gate.args[0] is up.args[0]):
        return None
    are_neighbours = [one.args[1] for one in (gate, up)] in [
        [(Ellipsis, slice(start, None, 2)), (Ellipsis, slice(1, None, 2))] for start in (None, 0)
    ]
    pairs: Any = gate.args[0]
    is_alone = len(pairs.users) == 2 and len(gate.users) == len(up.users) == 1
    return (pairs, float(limit)) if are_neighbours and is_alone else None


def match_squared_relu(node: object) -> fx.Node | None:
    """relu(x) ** 2: x, where nothing else reads relu(x)."""
    is_square = is_call(node, torch.square) or (is_call(node, operator.pow) and node.args[1:] == (2,))
    relu: Any = node.args[0] if isinstance(node, fx.Node) and is_square else None
    return relu.args[0] if is_call(relu, torch.relu) and len(relu.users) == 1 else None  # type: ignore[return-value]


def match_gelu(node: object) -> fx.Node | None:
    """gelu(x) by erf: x."""
    if not is_call(node, functional.gelu) or node.args[1:] or node.kwargs.get("approximate", "none") != "none":
        return None
    return node.args[0]  # type: ignore[return-value]


def _is_in_halves(node: fx.Node) -> bool:
    """True for a split or a chunk of the last dimension into two equal parts."""
    if not is_call(node, torch.split, torch.chunk):
        return False
    source: Any = node.args[0]
    parts: Any = node.args[1]
    dim = node.args[2] if len(node.args) > 2 else 0
    size = source.meta["val"].shape[-1]
    in_two = parts == 2 if node.target is torch.chunk else isinstance(parts, (list, tuple)) and len(parts) == 2
    is_even = size % 2 == 0 and (node.target is torch.chunk or parts[0] == parts[1])
    return in_two and is_even and dim in (-1, source.meta["val"].dim() - 1)


def match_residual(
    node: fx.Node, match: Callable[[object], Linear | None] = match_linear
) -> Iterator[tuple[Linear, fx.Node]]:
    """residual + linear, where nothing else reads the linear: (the linear, the residual), for either operand.

    Args:
        match: what is taken for a linear.
    """
    if not is_call(node, operator.add):
        return
    for residual, product in (node.args, node.args[::-1]):
        linear = match(product)
        if linear is None or len(linear.node.users) != 1 or not isinstance(residual, fx.Node):
            continue
        ours, theirs = linear.node.meta["val"], residual.meta["val"]
        is_like = ours.dtype == theirs.dtype and are_alike(linear.node, residual)
        if is_like and match_rms_norm(linear.source) is None:
            yield linear, residual
