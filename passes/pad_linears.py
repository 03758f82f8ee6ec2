"""Pads with zeros what a tower's linears sum over, to rows that tensor cores read at their full rate."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import GraphPass, PassResult, PassTarget
from mllm_compile.passes.match.nodes import (
    LINEAR,
    call,
    drop_dead_nodes,
    is_call,
    is_op,
    linear_operands,
    takes_kernels,
)

_ALIGNED = 8  # numbers of 16 bits in 16 bytes, which TMA reads
_LEAST = 512  # numbers of a row: where there are fewer the product is short


class PadLinears(GraphPass):
    """Makes rows of a tower's linears multiples of 16 bytes.

    Why: with rows of another size cuBLAS takes kernels of an older GPU. Of Qwen2.5-VL's tower, whose feed-forwards have
        3420 features, a product of 5476 patches took 247 µs on an H100, and with 3424 features 67 µs. The weight is
        copied each time, which takes a few. Towers alone, as they have thousands of rows: few tokens of a text would
        read their weights more often than they gain.

    Before::

        y = linear(x, weight, bias)                                                  # x [N, 3420], weight [1280, 3420]

    After::

        y = linear(constant_pad_nd(x, [0, 4]), constant_pad_nd(weight, [0, 4]), bias)

    Requires: a canonical graph; values of 16 bits on a GPU.
    Preserves: every value, except the order of sums.
    """

    name: ClassVar[str] = "pad_linears"

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        return None if target.device_type == "cuda" else "rows of any size are read alike by a CPU"

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        is_tower = any(is_op(node, "segment_attention") for node in gm.graph.nodes)
        found = [node for node in gm.graph.nodes if _is_unaligned(node)] if is_tower else []
        for node in found:
            missing = -_inner_size(node) % _ALIGNED
            with gm.graph.inserting_before(node):
                pad = torch.ops.aten.constant_pad_nd.default
                operands: list[Any] = [call(gm.graph, pad, one, [0, missing]) for one in linear_operands(node)[:2]]
            node.args = (*operands, *node.args[2:])
        drop_dead_nodes(gm)
        return PassResult(gm, len(found), before, len(gm.graph.nodes))


def _is_unaligned(node: fx.Node) -> bool:
    if not is_call(node, LINEAR) or not takes_kernels(node):
        return False
    return _inner_size(node) >= _LEAST and _inner_size(node) % _ALIGNED > 0


def _inner_size(linear: fx.Node) -> int:
    return int(linear_operands(linear)[1].meta["val"].shape[-1])
