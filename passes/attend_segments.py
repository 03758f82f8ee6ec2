"""Attends within a tower's segments by a kernel of the program for Hopper's tensor cores."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import NO_CUDA_COMPILER, GraphPass, PassResult, PassTarget
from mllm_compile.passes.match.nodes import is_op
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.segments.kernel import is_taken


class AttendSegments(GraphPass):
    """Gives a tower's attention to kernels that multiply heads of 72 or 80 as they are.

    Why: torch's flash attention is for older GPUs, and reaches a third of the tensor cores' rate with towers' heads.
        Kernels for Hopper take heads of 64 and 128 alone, and padded heads cost products (figures in
        docs/lab/images.md).

    Before::

        mllm.segment_attention_with_output(q, k, v, bounds, out, 0.118, "blocks.0.attn")

    After::

        mllm.segment_attention_by_kernel(q, k, v, bounds, out, 0.118, "blocks.0.attn")

    Requires: q, k and v in bfloat16 with heads as wide as each other, a multiple of 8 of 64 to 96, or 128. Every row
        sees its whole segment.
    Preserves: the meaning of the op; weights of keys are rounded as flash attention rounds them.
    """

    name: ClassVar[str] = "attend_segments"
    needs: ClassVar[tuple[str, ...]] = ("segment_attention_by_kernel",)

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        return None if target.compiles_cuda else NO_CUDA_COMPILER

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        count, matches = len(gm.graph.nodes), 0
        for node in gm.graph.nodes:
            if is_op(node, "segment_attention_with_output") and _is_taken(node):
                node.target, node.args = op("segment_attention_by_kernel"), node.args[:7]
                matches += 1
        return PassResult(gm, matches, count, count)


def _is_taken(node: fx.Node) -> bool:
    operands: list[Any] = list(node.args)
    if any(one not in (-1, None) for one in operands[8:15]) or any(operands[15:]):
        return False  # windows, a bias, sinks or a soft cap, which the kernels lack
    values = [operand.meta["val"] for operand in operands[:3]]
    head_dims = {int(value.shape[2]) for value in values}
    is_bfloat16 = all(value.dtype == torch.bfloat16 for value in values)
    return is_bfloat16 and len(head_dims) == 1 and is_taken(head_dims.pop(), operands[5])
