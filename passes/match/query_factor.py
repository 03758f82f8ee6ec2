"""Finds the constant that a model multiplies its queries by, which attention's scale can be."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from mllm_compile.passes.match.nodes import is_call, is_op, recompute_views

_SCALE = 4  # the place of the scale among the arguments of either op
_REARRANGING = ("view", "contiguous", torch.reshape, torch.transpose, torch.flatten, torch.unsqueeze)


def move_query_factor(gm: fx.GraphModule, attention: fx.Node) -> None:
    """Makes a power of two that nothing but queries are multiplied by part of a traced attention's scale.

    It changes no digit. Whisper scales its queries itself: ahead of each attention that would be a kernel of its own.
    """
    product = _product(attention.args[0]) if is_op(attention, "attention", "cross_attention") else None
    if product is None:
        return
    heads: Any
    heads, factor = product.args
    arguments: list[Any] = list(attention.args)
    arguments[_SCALE] *= factor
    attention.args = tuple(arguments)
    product.replace_all_uses_with(heads)
    gm.graph.erase_node(product)
    recompute_views([heads])


def _product(query: Any) -> fx.Node | None:
    """The product with a power of two that queries are, rearranged, if nothing else reads what is on the way."""
    while len(query.users) == 1 and is_call(query, *_REARRANGING):
        query = query.args[0]
    is_product = len(query.users) == 1 and is_call(query, operator.mul) and isinstance(query.args[1], float)
    return query if is_product and query.args[1] > 0 and math.frexp(query.args[1])[0] == 0.5 else None
