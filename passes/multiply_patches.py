"""Replaces a convolution whose kernel covers a whole patch by a linear."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import GraphPass, PassResult
from mllm_compile.passes.match.nodes import LINEAR, call, drop_dead_nodes, is_call

_DEFAULTS: tuple[Any, ...] = (None, None, None, 1, 0, 1, 1)  # input, weight, bias, stride, padding, dilation, groups


class MultiplyPatches(GraphPass):
    """Turns convolutions that give one number a channel and input into linears.

    Why: towers of images embed packed patches by a convolution in two or three dimensions whose kernel is the patch. As
        a product it is a GEMM; as a convolution of thousands of tiny inputs it takes kernels that are made for few
        large ones.

    Before::

        out = torch.conv3d(patches, weight, bias, (2, 14, 14))                            # patches [N, 3, 2, 14, 14]

    After::

        out = linear(torch.flatten(patches, 1), torch.flatten(weight, 1), bias)[..., None, None, None]

    Requires: a canonical graph.
    Preserves: every value, except the order of sums.
    """

    name: ClassVar[str] = "multiply_patches"

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        convolutions = [node for node in gm.graph.nodes if _covers_patches(node)]
        for node in convolutions:
            patches, weight, bias = _arguments(node)[:3]
            with gm.graph.inserting_before(node):
                rows, matrix = (call(gm.graph, torch.flatten, one, 1) for one in (patches, weight))
                product = call(gm.graph, LINEAR, rows, matrix, bias)
                ones = (None,) * (node.meta["val"].ndim - 2)
                node.replace_all_uses_with(call(gm.graph, operator.getitem, product, (Ellipsis, *ones)))
        drop_dead_nodes(gm)
        return PassResult(gm, len(convolutions), before, len(gm.graph.nodes))


def _covers_patches(node: fx.Node) -> bool:
    """True if the kernel is as large as each input, and nothing is padded."""
    if not is_call(node, torch.conv1d, torch.conv2d, torch.conv3d) or node.kwargs:
        return False
    patches, weight, _, _, padding, _, groups = _arguments(node)
    if padding not in (0, "valid") and (isinstance(padding, str) or any(padding)):
        return False
    # Their channels too: an image without a batch has channels first.
    sizes = patches.meta["val"].shape[1:], weight.meta["val"].shape[1:]
    return groups == 1 and all(isinstance(size, int) for size in sizes[0]) and sizes[0] == sizes[1]


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """All seven, by place."""
    return (*node.args, *_DEFAULTS[len(node.args) :])
