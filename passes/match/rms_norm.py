"""Recognises an RMS norm in the form that Transformers' models write."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mllm_compile.passes.match.nodes import is_call


@dataclass(frozen=True)
class RMSNorm:
    """x * rsqrt(mean(x ** 2, -1) + eps) in float32, times `weight`, or with `plus_one` times 1 + weight.

    Models round before they multiply by the weight, or behind it.
    """

    x: fx.Node
    weight: fx.Node
    eps: float
    plus_one: bool = False


def match_rms_norm(node: fx.Node) -> RMSNorm | None:
    """The norm whose result `node` is, or None. Inside a piece, where weights are plain placeholders."""
    return _match_rounded_first(node) or _match_rounded_last(node)


def _match_rounded_first(node: fx.Node) -> RMSNorm | None:
    """weight * (x.float() * rsqrt(…)).to(x.dtype)."""
    if not is_call(node, operator.mul):
        return None
    operands: Any = node.args
    for weight, rounded in (operands, operands[::-1]):
        found = _match_scaled(rounded.args[0]) if is_call(rounded, "to") else None
        if found is not None and _has_dtype_of(rounded, found[0]) and _is_weight_of(weight, found[0]):
            return RMSNorm(found[0], weight, found[1])
    return None


def _match_rounded_last(node: fx.Node) -> RMSNorm | None:
    """(x.float() * rsqrt(…) * weight.float()).to(x.dtype), or with 1 + weight.float()."""
    if not is_call(node, "to") or not is_call(node.args[0], operator.mul):
        return None
    factors: Any = node.args[0].args
    for factor, scaled in (factors, factors[::-1]):
        found, (weight, plus_one) = _match_scaled(scaled), _match_factor(factor)
        if found is None or not _has_dtype_of(node, found[0]) or not _is_weight_of(weight, found[0]):
            continue
        if _has_dtype_of(weight, found[0]):
            return RMSNorm(found[0], weight, found[1], plus_one)
    return None


def _match_scaled(node: object) -> tuple[fx.Node, float] | None:
    """x.float() * rsqrt(…) → x, eps."""
    if not is_call(node, operator.mul):
        return None
    factors: Any = node.args
    for wide, root in (factors, factors[::-1]):
        if is_call(root, torch.rsqrt) and _is_float32(wide):
            eps = match_mean_square(root.args[0], wide)
            if eps is not None:
                return _unconverted(wide.args[0]), eps
    return None


def _match_factor(node: Any) -> tuple[Any, bool]:
    """weight.float(), or 1 + weight.float() → the weight, and whether 1 is added."""
    if not is_call(node, operator.add):
        return (node.args[0] if _is_float32(node) else node), False
    operands: Any = node.args
    for one, weight in (operands, operands[::-1]):
        if type(one) in (int, float) and one == 1 and _is_float32(weight):
            return weight.args[0], True
    return None, False


def _is_weight_of(node: object, x: fx.Node) -> bool:
    """True for a weight of one dimension, the last of x."""
    if not isinstance(node, fx.Node) or node.op != "placeholder":
        return False
    return tuple(node.meta["val"].shape) == (x.meta["val"].shape[-1],)


def _has_dtype_of(node: fx.Node, other: fx.Node) -> bool:
    is_same: bool = node.meta["val"].dtype == other.meta["val"].dtype
    return is_same


def _unconverted(node: Any) -> Any:
    """The value ahead of changes to the type that it has."""
    while is_call(node, "to"):
        source: Any = node.args[0]
        if node.args[1:] != (source.meta["val"].dtype,):
            break
        node = source
    return node


def match_mean_square(node: object, wide: fx.Node) -> float | None:
    """eps of mean(wide ** 2, -1, keepdim=True) + eps; None for another node."""
    if not is_call(node, operator.add):
        return None
    mean, eps = node.args
    if not isinstance(eps, float) or not is_call(mean, torch.mean):
        return None
    square, *rest = mean.args
    if rest != [-1, True]:
        return None
    return eps if is_call(square, operator.pow) and square.args == (wide, 2) else None


def _is_float32(node: object) -> bool:
    return is_call(node, "to") and torch.float32 in (*node.args[1:], *node.kwargs.values())
