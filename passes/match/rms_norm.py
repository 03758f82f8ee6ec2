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
    """weight * (x.float() * rsqrt(mean(x.float() ** 2, -1) + eps)).to(x.dtype)."""

    x: fx.Node
    weight: fx.Node
    eps: float


def match_rms_norm(node: fx.Node) -> RMSNorm | None:
    """The norm whose result `node` is, or None. Inside a piece, where weights are plain placeholders."""
    if not is_call(node, operator.mul):
        return None
    for weight, scaled in (node.args, node.args[::-1]):
        if not (isinstance(weight, fx.Node) and weight.op == "placeholder" and weight.meta["val"].dim() == 1):
            continue
        found = _match_scaled(scaled)
        if found is not None and weight.meta["val"].shape[0] == found[0].meta["val"].shape[-1]:
            return RMSNorm(found[0], weight, found[1])
    return None


def _match_scaled(node: object) -> tuple[fx.Node, float] | None:
    """(x.float() * rsqrt(…)).to(dtype) → x, eps."""
    if not is_call(node, "to"):
        return None
    product = node.args[0]
    if not is_call(product, operator.mul):
        return None
    factors: Any = product.args
    for wide, root in (factors, factors[::-1]):
        if is_call(root, torch.rsqrt) and _is_float32(wide):
            eps = match_mean_square(root.args[0], wide)
            narrow = node.meta["val"].dtype == wide.args[0].meta["val"].dtype
            if eps is not None and narrow:
                return wide.args[0], eps
    return None


def match_mean_square(node: object, wide: fx.Node) -> float | None:
    """eps of mean(wide ** 2, -1, keepdim=True) + eps; None where the node is none."""
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
