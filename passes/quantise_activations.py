"""Multiplies by fp8 weights in fp8, in pieces for any number of tokens, or for more than 64, on Hopper."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import NO_CUDA_COMPILER, NO_VARIANTS, VARIANTS, GraphPass, PassResult, PassTarget
from mllm_compile.passes.match.nodes import call, called_pieces, is_op, is_symbolic, recompute_value, rewrite_pieces
from mllm_compile.passes.match.quantised import QuantisedLinear, match_quantised_linear
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.scaled_linear.kernel import is_taken
from mllm_compile.runtime.ops.stream_quantised.shapes import MAX_TOKENS_OF_ROWS
from mllm_compile.runtime.quantised.scheme import FP8_MAX, SMALLEST_SCALE

_GROUP = 128  # inputs that share a scale, where a row has several
_UNIT = 16  # rows and columns of the library's products are multiples of it
# Of a variant of stream_linears where larger steps multiply in fp8 by kernels of our own, of so many weights a piece.
_VARIANT_TOKENS, _LEAST_WEIGHTS = 32, 1 << 27


class QuantiseActivations(GraphPass):
    """Multiplies in fp8 where the weight is fp8: inputs get scales of a token, one for as many as the weight's have.

    Why: with many tokens the products are the limit, and fp8 tensor cores make twice as many; the weight need not be
        dequantised in each step. Servers mean this by `fp8`.

    Before::

        y = mllm.quantised_linear(x, values, scales, None, bias, "fp8", K)

    After::

        rows = to(reshape(x, (-1, K)), float32)
        x_scales = clamp(amax(abs(rows), -1, True) * (1 / 448), 1e-12)
        y = mllm.scaled_linear(to(clamp(rows / x_scales, -448, 448), float8_e4m3fn), x_scales, values, scales)
        y = reshape(y, …) + bias

    Of a weight with a scale for 128 inputs `rows` is [T, K / 128, 128] first, and x_scales [T, K / 128]. Inductor fuses
    the inputs' part with what makes x; behind `mllm.silu_mul` they are of one kernel with it, `mllm.silu_mul_in_fp8`.

    Requires: pieces in bfloat16 on a Hopper GPU, inputs of one dynamic size, and scales of rows or of 128 inputs.
        Variants for up to 64 tokens stay, as their kernels multiply in bfloat16. One changes: if a piece has many
        weights, and all its products have kernels of our own, its variant of `stream_linears` for up to 64 tokens
        becomes one for up to 32. With runtime.deterministic the pass is left out: numbers may not depend on the variant
        that a step takes.
    Preserves: the meaning, not the numbers: an input is rounded to three bits of mantissa (docs/lab/quantised.md has
        what that costs).
    """

    name: ClassVar[str] = "quantise_activations"
    needs: ClassVar[tuple[str, ...]] = ("quantised_linear", "scaled_linear", "silu_mul_in_fp8")

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        if target.deterministic:
            return NO_VARIANTS
        return None if target.compiles_cuda else NO_CUDA_COMPILER

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before, names = len(gm.graph.nodes), called_pieces(gm)
        matches = rewrite_pieces(gm, [*names, *_longer_variants(gm, names)], _quantise)
        for name in names:
            _shorten_variant(gm, name)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _longer_variants(gm: fx.GraphModule, names: list[str]) -> list[str]:
    """These pieces' variants for more tokens than kernels that read such weights take: variants of experts, which hold
    the linears around them too."""
    variants: dict[str, dict[int, str]] = gm.meta.get(VARIANTS, {})
    return [variant for name in names for most, variant in variants.get(name, {}).items() if most > MAX_TOKENS_OF_ROWS]


def _shorten_variant(gm: fx.GraphModule, name: str) -> None:
    """Leaves to products in fp8 those steps in which they take less time, and less energy, than the piece's variant.

    A decode step of 8B over a cache of fp8 with 48 and 64 requests: 3.97 and 4.30 ms by variants, 3.79 and 3.87 so (an
    H200, at its power limit); with 32 requests by variants 3.40. What makes the inputs, 15 µs a layer, is part of
    linears in variants: with fewer weights than 8B's, which has 193 million a layer, that may outweigh the rest. A
        piece that has
    weights in four bits besides keeps its variant: in a larger step they would be dequantised.
    """
    variants: dict[int, str] = gm.meta.get(VARIANTS, {}).get(name, {})
    piece: Any = gm.get_submodule(name)
    products = [node for node in piece.graph.nodes if is_op(node, "scaled_linear")]
    are_all = not any(is_op(node, "quantised_linear") for node in piece.graph.nodes)
    weights = [tuple(node.meta["val"] for node in product.args[2:]) for product in products]  # type: ignore[union-attr]
    have_kernels = all(scales.shape[1] == 1 and is_taken(*map(int, values.shape)) for values, scales in weights)
    are_many = sum(values.numel() for values, _ in weights) >= _LEAST_WEIGHTS
    if are_all and have_kernels and are_many and max(variants, default=0) == MAX_TOKENS_OF_ROWS:
        variants[_VARIANT_TOKENS] = variants.pop(MAX_TOKENS_OF_ROWS)


def _quantise(graph: fx.Graph, node: fx.Node) -> bool:
    linear = match_quantised_linear(node)
    if linear is None or not _is_taken(linear):
        return False
    columns, groups = linear.shape[1], int(linear.scales.meta["val"].shape[1])
    sizes = tuple(-1 if is_symbolic(size) else int(size) for size in node.meta["val"].shape)
    with graph.inserting_before(node):
        inputs, scales = _inputs(graph, linear.source, columns, groups)
        product = call(graph, op("scaled_linear"), inputs, scales, linear.values, linear.scales)
        product = call(graph, torch.reshape, product, sizes)
        if linear.bias is not None:
            product = call(graph, operator.add, product, linear.bias)
    product.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
    node.replace_all_uses_with(product)
    graph.erase_node(node)
    if is_op(linear.source, "silu_mul") and not linear.source.users:
        graph.erase_node(linear.source)
    return True


def _inputs(graph: fx.Graph, source: fx.Node, columns: int, groups: int) -> tuple[fx.Node, fx.Node]:
    """The linear's inputs [T, K] in fp8, and their scales [T, G]."""
    if is_op(source, "silu_mul") and len(source.users) == 1:
        both = call(graph, op("silu_mul_in_fp8"), source.args[0], groups)
        return call(graph, operator.getitem, both, 0), call(graph, operator.getitem, both, 1)
    shape = (-1, columns) if groups == 1 else (-1, groups, columns // groups)
    rows = _to(graph, call(graph, torch.reshape, source, shape), torch.float32)
    largest = call(graph, torch.amax, call(graph, torch.abs, rows), -1, True)
    scales = call(graph, torch.clamp, call(graph, operator.mul, largest, 1 / FP8_MAX), SMALLEST_SCALE)
    scaled = call(graph, torch.clamp, call(graph, operator.truediv, rows, scales), -FP8_MAX, FP8_MAX)
    inputs = _to(graph, scaled, torch.float8_e4m3fn)
    if groups == 1:
        return inputs, scales
    return call(graph, torch.reshape, inputs, (-1, columns)), call(graph, torch.reshape, scales, (-1, groups))


def _is_taken(linear: QuantisedLinear) -> bool:
    rows, columns = linear.shape
    source, scales = linear.source.meta["val"], linear.scales.meta["val"]
    has_scales = linear.kind == "fp8" and scales.shape[1] in (1, columns / _GROUP) and scales.dtype == torch.float32
    has_one_size = sum(map(is_symbolic, source.shape)) <= 1
    return has_scales and has_one_size and source.dtype == torch.bfloat16 and rows % _UNIT == columns % _UNIT == 0


def _to(graph: fx.Graph, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    node: fx.Node = graph.call_method("to", (value, dtype))
    recompute_value(node)
    return node
