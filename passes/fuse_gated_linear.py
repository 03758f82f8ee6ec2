"""Makes gate_up and its activation, and linears and their adapters, one kernel on Hopper, in pieces for many tokens."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import ANY_ROWS, NO_CUDA_COMPILER, VARIANTS, GraphPass, PassResult, PassTarget
from mllm_compile.passes.launch_lora import SOME_SUFFIX, shrunk_of
from mllm_compile.passes.match.linear import Linear, match_adapted_linear, match_linear, match_silu_mul
from mllm_compile.passes.match.nodes import call, called_pieces, replace_by_op, rewrite_pieces
from mllm_compile.passes.variants import copy_of
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.gated_linear.kernel import is_taken, parts_of, takes_adapters, takes_parts
from mllm_compile.runtime.ops.lora.shapes import MOST_SOME_TOKENS, Form
from mllm_compile.runtime.ops.stream_linear.shapes import MAX_LARGE_TOKENS


class FuseGatedLinear(GraphPass):
    """Activates a matrix product's sums before they leave the registers.

    Why: gates and ups are neither written nor read again. That saves up to 8 % of the time of both for 512 to 8192
        tokens of Qwen3-8B, and 7 to 24 % with 0.6B (figures in docs/lab/performance.md).

    Before::

        gate, up = split(linear(x, w), [n, n], dim=-1); y = silu(gate) * up

    After::

        y = mllm.gated_linear(x, w)

    With mllm.add_lora of both halves behind the linear it is mllm.gated_linear_lora, of what mllm.lora_shrink gives.
    Other linears with mllm.add_lora are mllm.linear_lora. A piece with adapters gets a variant for up to 1,024 tokens,
    which leaves these to the library.

    Requires: deduplicated pieces on a Hopper GPU in bfloat16, with a variant by stream_linears for up to 208 tokens at
        least, as the kernel's tiles are of 256; or with ANY_ROWS, as it computes a token alike in any company.
    Preserves: gates, ups and silu are rounded, as in the model, then the product.
    """

    name: ClassVar[str] = "fuse_gated_linear"
    needs: ClassVar[tuple[str, ...]] = ("gated_linear", "gated_linear_lora", "linear_lora", "lora_shrink", "lora_sum")

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        return None if target.compiles_cuda else NO_CUDA_COMPILER

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        variants = gm.meta.get(VARIANTS, {})
        names = [name for name in variants if max(variants[name]) >= MAX_LARGE_TOKENS]
        if gm.meta.get(ANY_ROWS):
            names = called_pieces(gm)
        matches = 0
        for name in names:
            some = _some_variant(gm, name)
            matches += rewrite_pieces(gm, [name], partial(_fuse, form="many"))
            matches += rewrite_pieces(gm, [name], _fuse_adapted)
            matches += rewrite_pieces(gm, some, partial(_fuse, form="some"))
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _some_variant(gm: fx.GraphModule, name: str) -> list[str]:
    """Gives a piece with adapters a variant for some tokens, where only gates and ups take theirs with them: tiles are
    of 256 tokens, and would be few."""
    piece: Any = gm.get_submodule(name)
    if not any(match_adapted_linear(node) for node in piece.graph.nodes):
        return []
    variant = name + SOME_SUFFIX
    gm.add_module(variant, copy_of(piece))
    gm.meta[VARIANTS][name][MOST_SOME_TOKENS] = variant
    return [variant]


def _fuse(graph: fx.Graph, node: fx.Node, form: Form) -> bool:
    product = match_silu_mul(node)
    if product is None or len(product.users) != 1:
        return False
    linear = match_linear(product) or match_adapted_linear(product)
    if linear is None or not _is_taken(linear):
        return False
    if not linear.adapters:
        replace_by_op(graph, node, op("gated_linear"), linear.source, linear.weight)
        return True
    _, b, slots, *parts, _ = linear.adapters
    if not takes_adapters(linear.shape[0], int(b.meta["val"].shape[2]), *parts):
        return False
    with graph.inserting_before(node):
        shrunk = _shrunk(graph, linear, form)
    replace_by_op(graph, node, op("gated_linear_lora"), linear.source, linear.weight, shrunk, b, slots)
    return True


def _is_taken(linear: Linear) -> bool:
    tensors = (linear.weight, *linear.adapters[:1])
    return is_taken(*linear.shape) and all(one.meta["val"].dtype == torch.bfloat16 for one in tensors)


def _fuse_adapted(graph: fx.Graph, node: fx.Node) -> bool:
    linear = match_adapted_linear(node)
    if linear is None or not _is_taken(linear):
        return False
    _, b, slots, starts, counts, _ = linear.adapters
    if not takes_parts(linear.shape, int(b.meta["val"].shape[2]), parts_of(starts, counts)):
        return False
    with graph.inserting_before(node):
        shrunk = _shrunk(graph, linear, "many")
    replace_by_op(graph, node, op("linear_lora"), linear.source, linear.weight, shrunk, b, slots, starts, counts)
    return True


def _shrunk(graph: fx.Graph, linear: Linear, form: Form) -> fx.Node:
    """[T, P * r] bfloat16."""
    a, _, slots, *_ = linear.adapters
    shrunk = shrunk_of(graph, linear.source, a, slots, form, False)
    if form == "some":
        shrunk = call(graph, op("lora_sum"), shrunk)
    return call(graph, torch.squeeze, shrunk, 0)
