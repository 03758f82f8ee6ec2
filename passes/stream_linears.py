"""Adds variants of pieces for up to 256 tokens on Hopper, whose linears stream their weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.add_lora import places_of_slots
from mllm_compile.passes.base import NO_CUDA_COMPILER, NO_VARIANTS, VARIANTS, GraphPass, PassResult, PassTarget
from mllm_compile.passes.fuse_few_tokens import LinearOps, few_token_variant
from mllm_compile.passes.match.experts import match_expert_linear
from mllm_compile.passes.match.linear import Linear, is_of_step, match_linear, match_quantised_as_linear
from mllm_compile.passes.match.nodes import LINEAR, called_pieces, is_call, is_op, linear_operands
from mllm_compile.passes.match.quantised import QuantisedLinear
from mllm_compile.passes.variants import add_variants
from mllm_compile.runtime.ops.stream_linear.adapted import MAX_TOKENS as ADAPTED_TOKENS
from mllm_compile.runtime.ops.stream_linear.adapted import parts_of
from mllm_compile.runtime.ops.stream_linear.adapted import takes as takes_adapters
from mllm_compile.runtime.ops.stream_linear.shapes import (
    VARIANT_TOKENS,
    is_held,
    is_read_in_rows,
    is_streamed,
    num_streamed_norm_blocks,
)
from mllm_compile.runtime.ops.stream_quantised.linear import kind_of_weight
from mllm_compile.runtime.ops.stream_quantised.shapes import is_streamed as is_quantised_streamed

_MOST_OF_ROUTER = 1 << 20  # elements of a router's weight that the library may multiply with
_ADAPTED = "_streamed_adapters"  # variants' names end so
_ADAPTED_OPS = "stream_linear_lora", "stream_linear_lora_residual", "stream_linear_lora_residual_norm"


class StreamLinears(GraphPass):
    """Does what `fuse_few_tokens` does, with `mllm.stream_linear…` in place of `mllm.few_linear…`.

    Why: these kernels load as much of their weight as a multiprocessor holds before the previous kernel has ended, give
        every multiprocessor the same share, and read large weights in long pieces (figures in docs/lab/performance.md).
        Triton cannot express them: copies arrive while a block waits, and blocks add up in each other's memory.

    Before::

        y = residual + linear(a, down)
        h = norm_weight * to(y.to(f32) * rsqrt(mean(y.to(f32) ** 2) + eps)); z = linear(h, weight)

    After::

        y, scaled, squares = mllm.stream_linear_residual_norm(a, down, residual, norm_weight)
        z = mllm.stream_linear(scaled, weight, squares, eps, False)

    relu(linear) ** 2 is `stream_linear(…, False, bias, True)`, with a bias or None, and gelu(linear) by erf
    `stream_linear(…, False, bias, False, True)`. A bias of a linear with a residual is a last operand.
    A linear of a weight in few bits, `mllm.quantised_linear(…)`, becomes `mllm.stream_quantised_linear…` likewise.

    A linear with mllm.add_lora behind it becomes `mllm.stream_linear_lora…` likewise, in a variant for up to 64
    tokens of pieces whose weights are all large (adapted.py).

    Requires: deduplicated pieces on a Hopper GPU in bfloat16, whose linears are all taken by a kernel (shapes.py),
        but for a router of few experts. Variants are for up to 208 tokens with a large weight, 128 with an fp8 weight
        with scales of groups, and 64 with a head or an fp8 weight with a scale a row (quantise_activations may make it
        32). The pass is left out where the kernels cannot be compiled. `fuse_few_tokens` adds its variant to pieces
        that have none here; the variant of `fuse_single_token` is dropped where this one is faster.
    Preserves: as `fuse_few_tokens`.
    """

    name: ClassVar[str] = "stream_linears"
    needs: ClassVar[tuple[str, ...]] = (
        "stream_linear",
        "stream_linear_residual",
        "stream_linear_residual_norm",
        *_ADAPTED_OPS,
        "stream_quantised_linear",
        "stream_quantised_linear_residual",
        "stream_quantised_linear_residual_norm",
    )

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        if target.any_rows:
            return NO_VARIANTS
        return None if target.compiles_cuda else NO_CUDA_COMPILER

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        matches = add_variants(gm, ADAPTED_TOKENS, _ADAPTED, _adapted_variant)
        for name in called_pieces(gm) if matches else ():
            _tell_early_slots(gm, name)
        for size in VARIANT_TOKENS:
            matches += add_variants(gm, size, "_streamed", partial(_variant, tokens=size))
        _drop_slower_variants(gm)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _variant(piece: fx.GraphModule, tokens: int) -> fx.GraphModule | None:
    """The piece's variant; None also where a linear would be left to the library, which is slow with few tokens."""
    return _variant_by(piece, streamed(tokens))


def _variant_by(piece: fx.GraphModule, ops: LinearOps) -> fx.GraphModule | None:
    linears = [node for node in piece.graph.nodes if is_call(node, LINEAR) or is_op(node, "quantised_linear")]
    has_experts = any(match_expert_linear(node) for node in piece.graph.nodes)
    are_taken = all(
        ops.match(node) or ops.is_within(node) or (has_experts and _is_small_router(node))
        for node in linears
        if is_of_step(node)
    )
    return few_token_variant(piece, ops) if are_taken else None


def _is_small_router(node: fx.Node) -> bool:
    """True for a linear of few outputs, as of a router with few experts, which the library may multiply with."""
    return is_call(node, LINEAR) and linear_operands(node)[1].meta["val"].numel() <= _MOST_OF_ROUTER


def _adapted_variant(piece: fx.GraphModule) -> fx.GraphModule | None:
    """The piece's variant whose linears take their adapters with them; None where one does not."""
    ops = replace(streamed(ADAPTED_TOKENS), is_adapted_taken=_is_adapted_taken)
    adapted = [node for node in piece.graph.nodes if is_op(node, "add_lora", "scale_of_adapters")]
    if not adapted or not all(ops.match(node) for node in adapted):
        return None
    return _variant_by(piece, ops)


def _tell_early_slots(gm: fx.GraphModule, name: str) -> None:
    """Says so in a piece's variant with adapters, where their slots are an input of the step."""
    variant: Any = getattr(gm, name + _ADAPTED, None)
    early = places_of_slots(gm, name)
    nodes = [] if variant is None else list(variant.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    for node in nodes:
        if is_op(node, *_ADAPTED_OPS):
            x, weight, a, b, slots, starts, rows, _, *others = node.args
            is_early = any(one is slots for place, one in enumerate(inputs) if place in early)
            node.args = (x, weight, a, b, slots, starts, rows, is_early, *others)


def _is_adapted_taken(linear: Linear) -> bool:
    a, b, _, *parts, _ = linear.adapters
    is_bfloat16 = all(one.meta["val"].dtype == torch.bfloat16 for one in (linear.source, a, b))
    return is_bfloat16 and takes_adapters(*linear.shape, int(b.meta["val"].shape[2]), parts_of(*parts))


def _drop_slower_variants(gm: fx.GraphModule) -> None:
    """Leaves one token to this pass's variant where that has a kernel for few tokens; heads have none.

    All kernels of a layer at one token, by Triton and by these: Qwen3-8B 100.2 and 97.1 µs, the shapes of Qwen3-4B 65.3
    and 55.4 and 1.7B 36.5 and 32.2.
    """
    for name, variants in gm.meta[VARIANTS].items():
        piece: Any = gm.get_submodule(name)
        linears = [match_linear(node) for node in piece.graph.nodes]
        has_kernels = any(one and (is_read_in_rows(*one.shape) or is_held(*one.shape)) for one in linears)
        has_kernels |= any(match_quantised_as_linear(node, takes_bias=True) for node in piece.graph.nodes)
        if 1 in variants and len(variants) > 1 and has_kernels:
            gm.delete_submodule(variants.pop(1))


def streamed(tokens: int) -> LinearOps:
    """The ops for steps of up to `tokens` tokens."""
    return LinearOps(
        prefix="stream",
        is_taken=partial(is_streamed, tokens=tokens),
        num_norm_blocks=num_streamed_norm_blocks,
        takes_float16=False,
        takes_bias=True,
        activates=True,
        is_quantised_taken=partial(_is_quantised_taken, tokens=tokens),
    )


def _is_quantised_taken(linear: QuantisedLinear, half: bool, tokens: int) -> bool:
    zeros = None if linear.zeros is None else linear.zeros.meta["val"]
    kind = kind_of_weight(linear.values.meta["val"], linear.scales.meta["val"], zeros)
    if half:
        kind = replace(kind, rows=kind.rows // 2)
    has_order = linear.kind != "int4"  # as int4_lanes alone kernels take integers
    return has_order and kind.columns == linear.shape[1] and is_quantised_streamed(kind, tokens)
