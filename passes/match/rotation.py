"""Recognises the rotation of queries and keys by their positions, with a norm ahead of it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mllm_compile.passes.match.nodes import is_call
from mllm_compile.passes.match.rms_norm import RMSNorm, match_rms_norm


@dataclass(frozen=True)
class Rotation:
    """source [1, T, H, D], perhaps normed, its first R columns rotated by cos and sin [1, T, R]; without these none.

    Attributes:
        are_halves: cos and sin are [1, T, R / 2], for both halves.
    """

    source: fx.Node
    norm: RMSNorm | None
    cos: fx.Node | None
    sin: fx.Node | None
    are_halves: bool = False


def match_rotation(flat: fx.Node) -> Rotation | None:
    """[T, H, D] ← reshape or flatten ← transpose of x * cos + rotate_half(x) * sin over x [1, H, T, D], or over its
    first columns, with the others behind them; or of a projection's heads as they are."""
    node: Any = flat.args[0] if is_call(flat, "contiguous") else flat
    if not is_call(node, torch.reshape, torch.flatten, "view") or len(node.meta["val"].shape) != 3:
        return None
    heads = _transposed(node.args[0])
    halves = _match_halves(heads)
    if halves is not None:
        return halves
    rotated, rest = _parts(heads)
    if not is_call(rotated, operator.add):
        plain = _transposed(heads)
        return Rotation(plain, None, None, None) if is_call(plain, "view") and plain.meta["val"].dim() == 4 else None
    first, second = rotated.args
    for straight, crossed in ((first, second), (second, first)):
        found = _match_products(straight, crossed, rest)
        if found is not None:
            return found
    return None


def _match_halves(rotated: Any) -> Rotation | None:
    """cat((a * cos - b * sin, b * cos + a * sin), -1) of the halves a and b of x, as gpt-oss has it."""
    upper, lower = _parts(rotated)
    if not (is_call(upper, operator.sub) and is_call(lower, operator.add)):
        return None
    products: list[Any] = [*upper.args, *lower.args]
    if not all(is_call(product, operator.mul) for product in products):
        return None
    (a, cos), (b, sin), *crossed = (product.args for product in products)
    chunk: Any = a.args[0] if is_call(a, operator.getitem) else None
    if crossed != [(b, cos), (a, sin)] or not is_call(chunk, torch.chunk) or chunk.args[1:] != (2, -1):
        return None
    if a.args != (chunk, 0) or not is_call(b, operator.getitem) or b.args != (chunk, 1):
        return None
    x: Any = chunk.args[0]
    cos, sin = _angles(cos), _angles(sin)
    source, norm = _heads(x)
    if cos is None or sin is None or source is None or len(source.meta["val"].shape) != 4:
        return None
    are_of_halves = all(2 * one.meta["val"].shape[-1] == x.meta["val"].shape[-1] for one in (cos, sin))
    return Rotation(source, norm, cos, sin, are_halves=True) if are_of_halves else None


def _parts(node: Any) -> tuple[Any, Any]:
    """The operands of cat((a, b), -1); any other value, and None."""
    is_joined = is_call(node, torch.cat) and len(node.args[0]) == 2 and node.args[1:] == (-1,)  # type: ignore[arg-type]
    return tuple(node.args[0]) if is_joined else (node, None)


def _match_products(straight: object, crossed: object, rest: object) -> Rotation | None:
    """x * cos and rotate_half(x) * sin; if there is a rest, x is the first columns of what `rest` is the others of."""
    if not (is_call(straight, operator.mul) and is_call(crossed, operator.mul)):
        return None
    x, cos = straight.args
    half, sin = crossed.args
    if not isinstance(x, fx.Node) or not _is_rotate_half(half, x):
        return None
    cos, sin, width = _angles(cos), _angles(sin), x.meta["val"].shape[-1]
    source, norm = _heads(x if rest is None else _whole(x, rest))
    if cos is None or sin is None or source is None or len(source.meta["val"].shape) != 4:
        return None
    if cos.meta["val"].shape[-1] != width or sin.meta["val"].shape[-1] != width:
        return None
    return Rotation(source, norm, cos, sin)


def _whole(x: fx.Node, rest: object) -> fx.Node | None:
    """The value whose first columns are x and whose others are `rest`."""
    source: Any = x.args[0] if is_call(x, operator.getitem) else None
    width = x.meta["val"].shape[-1]
    are_parts = _is_slice(x, source, slice(None, width, None)) and _is_slice(rest, source, slice(width, None, None))
    return source if are_parts else None


def _heads(x: fx.Node | None) -> tuple[fx.Node | None, RMSNorm | None]:
    """[1, T, H, D] that x [1, H, T, D] is made of, and the norm between: ahead of the transposition, or behind it."""
    norm = None if x is None else match_rms_norm(x)
    if norm is not None:
        return _transposed(norm.x), norm
    heads = _transposed(x)
    norm = None if heads is None else match_rms_norm(heads)
    return (heads, None) if norm is None else (norm.x, norm)


def _is_rotate_half(node: object, x: fx.Node) -> bool:
    """cat((-x[..., D/2:], x[..., :D/2]), -1)."""
    if not is_call(node, torch.cat) or node.args[1:] != (-1,):
        return False
    parts: Any = node.args[0]
    half = x.meta["val"].shape[-1] // 2
    if len(parts) != 2 or not is_call(parts[0], operator.neg):
        return False
    return _is_slice(parts[0].args[0], x, slice(half, None, None)) and _is_slice(parts[1], x, slice(None, half, None))


def _is_slice(node: object, x: fx.Node, columns: slice) -> bool:
    return is_call(node, operator.getitem) and node.args == (x, (Ellipsis, columns))


def _angles(node: object) -> fx.Node | None:
    """unsqueeze(angles [1, T, D], 1) → angles."""
    if not is_call(node, torch.unsqueeze) or node.args[1:] != (1,):
        return None
    angles: Any = node.args[0]
    val = angles.meta["val"]
    return angles if val.dim() == 3 and val.shape[0] == 1 else None


def _transposed(node: object) -> fx.Node | None:
    """x.transpose(1, 2) → x."""
    if not is_call(node, torch.transpose) or node.args[1:] != (1, 2):
        return None
    source = node.args[0]
    return source if isinstance(source, fx.Node) else None
