"""Makes the linear and the GELU behind it of packed rows one product, which activates its sums in registers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import fx
from torch.nn import functional

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

_DTYPES = (torch.bfloat16, torch.float16)


class FuseGelu(GraphPass):
    """Gives cuBLAS the activation of a tower's feed-forward, which is one of those that its products can end with.

    Why: with 4096 patches of 4304 features the activation alone takes 31 µs on an H100, half as long as the product
        ahead of it: it reads and writes the product's output. GELU by erf takes longer: a step of bert-base with 8192
        tokens takes 3.74 ms on an H200, and 4.07 with it (docs/lab/encoders.md).

    Before::

        y = gelu(linear(x, weight, bias), approximate="tanh")                                            # x [N, K]

    After::

        y = aten._addmm_activation(bias, x, weight.t(), use_gelu=True)

    Requires: a canonical graph; values of 16 bits on a GPU, whose products take GELU by tanh; a bias; patches in rows,
        or texts in one.
    Preserves: every value, except for one rounding less ahead of the activation. In bfloat16 GELU by erf becomes one by
        tanh, off by 5e-4 at most: of all-MiniLM-L6-v2's embeddings an eighth of what rounding does to them, which both
        together leave as it is (docs/lab/encoders.md).
    """

    name: ClassVar[str] = "fuse_gelu"

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        return None if target.device_type == "cuda" else "a CPU's product ends with another GELU"

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before, matches = len(gm.graph.nodes), 0
        is_tower = any(is_op(node, "segment_attention") for node in gm.graph.nodes)
        for node in list(gm.graph.nodes) if is_tower else ():
            if (linear := _activated(node)) is not None:
                x, weight, bias = linear_operands(linear)
                is_batch = x.meta["val"].ndim == 3  # of one: texts in a row
                with gm.graph.inserting_before(node):
                    rows = call(gm.graph, torch.ops.aten.squeeze.dim, x, 0) if is_batch else x
                    columns = call(gm.graph, torch.ops.aten.t.default, weight)
                    fused = torch.ops.aten._addmm_activation.default
                    out = call(gm.graph, fused, bias, rows, columns, use_gelu=True)
                    out = call(gm.graph, torch.ops.aten.unsqueeze.default, out, 0) if is_batch else out
                    node.replace_all_uses_with(out)
                matches += 1
        drop_dead_nodes(gm)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _activated(node: fx.Node) -> fx.Node | None:
    """The linear whose only reader `node` is a GELU that a product may end with."""
    said: Any = (*node.args[1:], *node.kwargs.values())
    is_gelu = is_call(node, functional.gelu)
    if not is_gelu or (said != ("tanh",) and node.meta["val"].dtype is not torch.bfloat16):
        return None
    linear: Any = node.args[0]
    if not is_call(linear, LINEAR) or len(linear.users) != 1 or not takes_kernels(linear):
        return None
    x, _, bias = linear_operands(linear)
    shape = x.meta["val"].shape
    is_row = len(shape) == 2 or (len(shape) == 3 and isinstance(shape[0], int) and shape[0] == 1)
    return linear if bias is not None and is_row and linear.meta["val"].dtype in _DTYPES else None
