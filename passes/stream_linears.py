"""A form of each piece for steps of up to 64 tokens on Hopper, with linears that stream their weights."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import PassResult
from mllm_compile.passes.fuse_few_tokens import LinearOps, few_token_form
from mllm_compile.passes.fx_match import LINEAR, is_call
from mllm_compile.passes.small_forms import add_forms
from mllm_compile.runtime.stream_linear.shapes import MAX_STREAMED_TOKENS, is_streamed, num_streamed_norm_blocks


class StreamLinears:
    """As `fuse_few_tokens`, with the ops `mllm.stream_linear…` in place of `mllm.few_linear…`.

    Why: a kernel that asks for as much of its weight as a multiprocessor holds before the kernel ahead has ended, and
        gives every multiprocessor the same share (figures in docs/performance.md). It needs what Triton has no words
        for: tiles that arrive while a block waits, and blocks that add up in each other's memory.

    Before::

        y = residual + linear(a, down)
        h = norm_weight * to(y.to(f32) * rsqrt(mean(y.to(f32) ** 2) + eps)); z = linear(h, weight)

    After::

        y, scaled, squares = mllm.stream_linear_residual_norm(a, down, residual, norm_weight)
        z = mllm.stream_linear(scaled, weight, squares, eps, False)

    Requires: deduplicated pieces on a Hopper GPU in bfloat16, with no linear that others read faster (shapes.py); the
        compiler's driver leaves this pass out where the kernels cannot be compiled. A piece that has a form here gets
        none from `fuse_few_tokens`.
    Preserves: as `fuse_few_tokens`.
    """

    name: ClassVar[str] = "stream_linears"

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        matches = add_forms(gm, MAX_STREAMED_TOKENS, "_streamed", _form)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _form(piece: fx.GraphModule) -> fx.GraphModule | None:
    """None too where a linear would be left to the library, which is slow with few tokens: one with a bias, say."""
    linears = [node for node in piece.graph.nodes if is_call(node, LINEAR, torch.nn.functional.linear)]
    return few_token_form(piece, STREAMED) if all(STREAMED.match(node) for node in linears) else None


STREAMED = LinearOps(
    prefix="stream",
    module="mllm_compile.runtime.stream_linear.ops",
    is_taken=is_streamed,
    num_norm_blocks=num_streamed_norm_blocks,
    takes_float16=False,
)
