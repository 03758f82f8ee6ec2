"""Writes out, in pieces on Hopper, how a quantised weight is dequantised, so that Inductor makes it one kernel."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import NO_CUDA_COMPILER, VARIANTS, GraphPass, PassResult, PassTarget
from mllm_compile.passes.match.nodes import LINEAR, call, called_pieces, recompute_value, replace_by_op, rewrite_pieces
from mllm_compile.passes.match.quantised import QuantisedLinear, match_quantised_linear
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.quantised.scheme import INT4_ZERO


class DequantiseWeights(GraphPass):
    """Dequantises a weight by operations of the piece, ahead of a product that no kernel of ours takes.

    Why: the op does it in several kernels, with a float32 copy of the weight between them: 20 bytes are moved for each
        number of the weight. One kernel reads the number and writes it in the activations' dtype: with the product 5.

    Before::

        y = mllm.quantised_linear(x, values, scales, None, bias, "fp8", K)

    After::

        y = linear(x, to(to(values, float32) * scales, bfloat16), bias)

    Of integers in lanes the weight is `mllm.dequantised_integers(values, scales, zeros, bfloat16)`.

    Requires: pieces with all their variants, on a Hopper GPU: others' Triton has no eight-bit floats. Groups that
    divide
        the inputs; any other weight is left to the op.
    Preserves: every number bitwise; the product is the library's, as the op's is.
    """

    name: ClassVar[str] = "dequantise_weights"
    needs: ClassVar[tuple[str, ...]] = ("quantised_linear", "dequantised_integers")

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        return None if target.compiles_cuda else NO_CUDA_COMPILER

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        variants = (variant for variants in gm.meta.get(VARIANTS, {}).values() for variant in variants.values())
        matches = rewrite_pieces(gm, [*called_pieces(gm), *variants], _write_out)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _write_out(graph: fx.Graph, node: fx.Node) -> bool:
    linear = match_quantised_linear(node)
    if linear is None or linear.shape[1] % linear.group or (linear.kind != "fp8" and linear.shape[1] % 2):
        return False
    with graph.inserting_before(node):
        weight = _weight(graph, linear)
    replace_by_op(graph, node, LINEAR, linear.source, weight, linear.bias)
    return True


def _weight(graph: fx.Graph, linear: QuantisedLinear) -> fx.Node:
    """[N, K] in the dtype of x, multiplied in float32 and rounded once."""
    rows, columns = linear.shape
    dtype = linear.source.meta["val"].dtype
    if linear.kind == "int4_lanes":
        return call(graph, op("dequantised_integers"), *linear.tensors, dtype)
    numbers = call(graph, torch.reshape, _numbers(graph, linear), (rows, columns // linear.group, linear.group))
    if linear.kind == "int4":
        zeros = INT4_ZERO if linear.zeros is None else _of_groups(graph, linear.zeros)
        numbers = call(graph, operator.sub, numbers, zeros)
    product = call(graph, operator.mul, numbers, _scales(graph, linear))
    weight = call(graph, torch.reshape, product, (rows, columns))
    return _to(graph, weight, dtype)


def _numbers(graph: fx.Graph, linear: QuantisedLinear) -> fx.Node:
    """float32 of the values; of four-bit ones two a byte, the low one first."""
    if linear.kind == "fp8":
        return _to(graph, linear.values, torch.float32)
    low, high = call(graph, operator.and_, linear.values, 15), call(graph, operator.rshift, linear.values, 4)
    codes = call(graph, torch.stack, (low, high), -1)
    if linear.kind == "int4":
        return _to(graph, codes, torch.float32)
    # Sizes of E2M1 are halves up to 2, then 3, 4 and 6; the highest bit is the sign.
    size = _to(graph, call(graph, operator.and_, codes, 7), torch.float32)
    sign = _to(graph, call(graph, operator.rshift, codes, 3), torch.float32)
    beyond_4, beyond_6 = (call(graph, torch.clamp, call(graph, operator.sub, size, start), 0.0) for start in (4, 6))
    halves = call(
        graph, operator.add, call(graph, operator.add, size, beyond_4), call(graph, operator.mul, beyond_6, 2)
    )
    factor = call(graph, operator.sub, 0.5, sign)
    return call(graph, operator.mul, halves, factor)


def _scales(graph: fx.Graph, linear: QuantisedLinear) -> fx.Node:
    """[N, G, 1] in float32."""
    if linear.kind == "mxfp4":  # bytes, which are float32's exponents
        bits = call(graph, operator.lshift, _to(graph, linear.scales, torch.int32), 23)
        powers: Any = graph.call_method("view", (bits, torch.float32))
        recompute_value(powers)
        return call(graph, torch.unsqueeze, powers, -1)
    scales = _of_groups(graph, linear.scales)
    if linear.kind == "nvfp4" and linear.zeros is not None:
        return call(graph, operator.mul, scales, _of_groups(graph, linear.zeros))
    return scales


def _of_groups(graph: fx.Graph, tensor: fx.Node) -> fx.Node:
    """[N, G, 1] in float32."""
    return call(graph, torch.unsqueeze, _to(graph, tensor, torch.float32), -1)


def _to(graph: fx.Graph, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    if value.meta["val"].dtype == dtype:
        return value
    node: fx.Node = graph.call_method("to", (value, dtype))
    recompute_value(node)
    return node
