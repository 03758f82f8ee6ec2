"""Lets the weights around attention carry a checkpoint's scales of a KV cache in few bits."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import (
    CACHE_DTYPE,
    CACHE_SCALES,
    IS_CONSTANT,
    WEIGHT_FACTORS,
    WEIGHT_SCHEMES,
    CacheScales,
    GraphPass,
    PassResult,
    WeightFactor,
)
from mllm_compile.passes.match.nodes import LINEAR, is_attention, is_call, is_weight, linear_operands

# A factor on their operand is one on their value.
_REARRANGING: tuple[Any, ...] = (
    *(torch.reshape, torch.transpose, torch.unsqueeze, torch.flatten, torch.split, torch.chunk),
    *(operator.getitem, operator.neg, "to", "view", "contiguous", "permute", "expand", "squeeze", "clone"),
)
_OF_NUMBERS = (operator.mul, operator.truediv)


class ScaleKeysAndValues(GraphPass):
    """Multiplies weights by the checkpoint's scales, so that keys and values fit into fp8.

    Why: a scale belongs to all keys of a layer, or to all its values. Divided out of keys' and values' weights, and
        multiplied into the queries' and behind attention, it costs a step nothing, and no kernel knows it.

    Before::

        q = rotate(norm(linear(x, wq)) * nq); k = rotate(norm(linear(x, wk)) * nk); v = linear(x, wv)
        y = linear(mllm.attention(q, k, v, …), wo)

    After::

        the same graph, of weights nq · sk, nk / sk, wv / sv and wo · sv, and gm.meta[WEIGHT_FACTORS], which says so

    Where q and k have no norm, wq · sk and wk / sk, and biases likewise. The loader takes the next power of two of a
    scale: that changes no digit of a weight.

    Requires: a canonical graph, a KV cache in fp8 (gm.meta[CACHE_DTYPE]), and gm.meta[CACHE_SCALES], which says which
        scales the checkpoint has beside a weight. Queries, keys and values that a factor on a weight is a factor on,
        and that nothing else reads; what attention gives goes to a linear. The scales of other layers are left out.
    Preserves: every number of the graph behind attention, bitwise in a cache that rounds nothing.
    """

    name: ClassVar[str] = "scale_keys_and_values"

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        factors: dict[str, WeightFactor] = gm.meta.setdefault(WEIGHT_FACTORS, {})
        is_small = gm.meta.get(CACHE_DTYPE) == torch.float8_e4m3fn
        scales: dict[str, CacheScales] = gm.meta.get(CACHE_SCALES, {}) if is_small else {}
        before, size = len(factors), len(gm.graph.nodes)
        for node in gm.graph.nodes if scales else ():
            if is_attention(node):
                _scale(gm, node, scales, factors)
        return PassResult(gm, len(factors) - before, size, size)


def _scale(
    gm: fx.GraphModule, attention: fx.Node, scales: dict[str, CacheScales], factors: dict[str, WeightFactor]
) -> None:
    queries, keys, values = (_weights_of(operand, attention) for operand in attention.args[:3])
    for name, divided, multiplied in (
        (_scale_beside(keys, scales, "keys"), keys, queries),
        (_scale_beside(values, scales, "values"), values, _weights_behind(attention)),
    ):
        if name is None or not _take_factors(gm, [*divided, *multiplied]) or not multiplied:
            continue
        factors |= {weight.meta["weight_name"]: WeightFactor(name, True) for weight in divided}
        factors |= {weight.meta["weight_name"]: WeightFactor(name, False) for weight in multiplied}


def _scale_beside(weights: Iterable[fx.Node], scales: dict[str, CacheScales], of: str) -> str | None:
    names = {getattr(scales.get(weight.meta["weight_name"]), of, None) for weight in weights}
    return names.pop() if len(names) == 1 else None


def _take_factors(gm: fx.GraphModule, weights: list[fx.Node]) -> bool:
    """True if each weight is the checkpoint's and one reader's alone, and one in few bits has scales for a factor."""
    weight_schemes = gm.meta.get(WEIGHT_SCHEMES)
    schemes = [weight_schemes.schemes.get(weight.meta["weight_name"]) for weight in weights] if weight_schemes else []
    are_floats = all(scheme is None or scheme.scale_dtype.itemsize > 1 for scheme in schemes)
    are_own = all(len(weight.users) == 1 and not weight.meta.get(IS_CONSTANT) for weight in weights)
    return are_floats and are_own and len(set(weights)) == len(weights)


def _weights_of(value: Any, attention: fx.Node) -> tuple[fx.Node, ...]:
    """Finds the weights whose factor becomes `value`'s factor; attention alone reads `value`. Possibly ()."""
    inside: set[fx.Node] = set()
    found = _search(value, inside)
    is_read_elsewhere = any(user not in inside and user is not attention for node in inside for user in node.users)
    return () if is_read_elsewhere else found


def _search(node: Any, inside: set[fx.Node]) -> tuple[fx.Node, ...]:
    """Finds those weights, in the order of the graph, and puts what is between them and `node` into `inside`."""
    if not isinstance(node, fx.Node):
        return ()
    inside.add(node)
    if is_call(node, LINEAR):
        weights = tuple(one for one in linear_operands(node)[1:] if one is not None)
        return weights if all(map(is_weight, weights)) else ()
    if is_call(node, *_REARRANGING):
        return _search(node.args[0], inside)
    if is_call(node, torch.cat):
        return _of_all([_search(one, inside) for one in node.args[0]])  # type: ignore[union-attr]
    if is_call(node, operator.add, operator.sub):
        return _of_all([_search(one, inside) for one in node.args])
    return _search_product(node, inside) if is_call(node, *_OF_NUMBERS) else ()


def _search_product(node: fx.Node, inside: set[fx.Node]) -> tuple[fx.Node, ...]:
    """Finds the weights of the one operand that carries the factor; the other must not, as a norm's takes it away
    again."""
    for one, other in (node.args, node.args[::-1]):
        if is_weight(one) and len(one.meta["val"].shape) == 1:
            return (one,)
        if node.target is operator.truediv and one is node.args[1]:
            continue
        within: set[fx.Node] = set()
        found = _search(one, within)
        if found and not _comes_from(other, {*found, *within}):
            inside |= within
            return found
    return ()


def _of_all(found: list[tuple[fx.Node, ...]]) -> tuple[fx.Node, ...]:
    return found[0] if len(set(found)) == 1 else ()


def _comes_from(node: Any, sources: set[fx.Node]) -> bool:
    seen, wanted = set(), [node]
    while wanted:
        one = wanted.pop()
        if one in sources:
            return True
        if isinstance(one, fx.Node) and one not in seen:
            seen.add(one)
            wanted += one.all_input_nodes
    return False


def _weights_behind(attention: fx.Node) -> tuple[fx.Node, ...]:
    """Finds the weights of linears that read what attention gives, where nothing else does; possibly ()."""
    found: list[fx.Node] = []
    wanted, carrying = [attention], {attention}
    while wanted:
        node = wanted.pop()
        for user in node.users:
            if is_call(user, LINEAR) and user.args[0] is node and is_weight(user.args[1]):
                found.append(user.args[1])
            elif is_call(user, *_REARRANGING) or (is_call(user, *_OF_NUMBERS) and _is_scaled(user, node, carrying)):
                carrying.add(user)
                wanted.append(user)
            else:
                return ()
    return tuple(found)


def _is_scaled(product: fx.Node, node: fx.Node, carrying: set[fx.Node]) -> bool:
    """True if of a product's operands `node` alone comes from what is scaled."""
    first, other = product.args
    if first is not node:
        first, other = other, first
    is_divisor = product.target is operator.truediv and product.args[0] is not node
    return not is_divisor and first is not other and not _comes_from(other, carrying)
