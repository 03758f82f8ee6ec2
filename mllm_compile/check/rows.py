"""Compares products of few rows with those of many, to the last bit: what steps of any number of rows stand on.

The deterministic mode has such steps (runtime.any_rows). Which kernels of the library add up in one order is written
nowhere. So each linear of a model is tried where it is compiled.

Shape legend: N outputs and K inputs of a linear.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from mllm_compile.errors import UnlikeRowsError
from mllm_compile.passes.match.nodes import LINEAR, called_pieces, is_call, is_op, linear_operands
from mllm_compile.passes.match.quantised import match_quantised_linear
from mllm_compile.runtime.config_sections import LEAST_ROWS
from mllm_compile.runtime.device.open import sum_in_one_order

_MOST_ROWS = 2048
# Of decodes that are captured, of prompts, and odd ones between.
_COUNTS = (*range(LEAST_ROWS, 257, 16), 65, 127, 201, 300, 384, 511, 700, 1024, 1537)


_OTHER_PRODUCTS = (operator.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum)


class _Linear(NamedTuple):
    num_outputs: int
    num_inputs: int
    dtype: torch.dtype
    has_bias: bool


def check_rows(graph: fx.GraphModule, device: str) -> None:
    """
    Args:
        graph: after the passes; its linears are tried with random weights.

    Raises:
        UnlikeRowsError: a row's numbers depend on how many rows there are.
    """
    sum_in_one_order()
    for linear in _linears_of(graph):
        generator = torch.Generator(device).manual_seed(0)
        shapes = ((_MOST_ROWS, linear.num_inputs), (linear.num_outputs, linear.num_inputs), (linear.num_outputs,))
        x, weight, bias = (
            torch.randn(shape, generator=generator, device=device, dtype=linear.dtype) for shape in shapes
        )
        operands = (weight, bias) if linear.has_bias else (weight,)
        whole = torch.nn.functional.linear(x, *operands)
        for count in _COUNTS:
            if not torch.equal(torch.nn.functional.linear(x[:count], *operands), whole[:count]):
                raise UnlikeRowsError(
                    f"a product of {count} rows with a weight of {linear.num_outputs} x {linear.num_inputs} in "
                    f"{linear.dtype} differs in its last bits from one of {_MOST_ROWS}"
                )


def _linears_of(graph: fx.GraphModule) -> list[_Linear]:
    """Each linear of the pieces once, also if few of its rows or its quantised weights are multiplied otherwise.

    Raises:
        UnlikeRowsError: a piece has another product.
    """
    found: dict[_Linear, None] = {}
    for name in called_pieces(graph):
        piece: Any = graph.get_submodule(name)
        for node in piece.graph.nodes:
            quantised = match_quantised_linear(node)
            if is_call(node, LINEAR) or is_op(node, "linear_in_one_order") or quantised is not None:
                source, bias = (quantised.source, quantised.bias) if quantised else linear_operands(node)[::2]
                output: Any = node.meta["val"]
                sizes = int(output.shape[-1]), int(source.meta["val"].shape[-1])
                found[_Linear(*sizes, output.dtype, bias is not None)] = None
            elif is_call(node, *_OTHER_PRODUCTS):
                raise UnlikeRowsError(f"the model has a product by {node.target}, whose sums are not known")
    return list(found)
