"""multiply_outer_products: which products it takes, and that numbers stay as they are."""

from __future__ import annotations

import operator

import pytest
import torch

from mllm_compile.passes.multiply_outer_products import MultiplyOuterProducts
from tests.passes.support.graph_builder import HIDDEN, GraphBuilder, run, targets


def rotary_graph(product=operator.matmul, method=False):
    """x + cos of angles [1, HIDDEN, T], made as Transformers makes rotary positions' angles."""
    builder = GraphBuilder()
    frequencies = builder.method("view", builder.weight("inv_freq", HIDDEN), 1, HIDDEN, 1)
    positions = builder.method("float", builder.method("view", builder.positions, 1, 1, builder.size_inputs["T"]))
    make = (lambda *args: builder.method("matmul", *args)) if method else (lambda *args: builder.call(product, *args))
    angles = builder.method("transpose", make(frequencies, positions), 1, 2)
    cosines = builder.method("view", builder.method("cos", angles), builder.size_inputs["T"], HIDDEN)
    return builder.canonical(builder.head(builder.call(torch.add, builder.embed(), cosines)))


@pytest.mark.parametrize("product", [operator.matmul, torch.matmul, torch.bmm, "method"])
def test_a_product_of_a_column_and_a_row_is_a_multiplication_of_the_same_bits(product):
    gm = rotary_graph(product, method=product == "method")
    before = run(gm)
    result = MultiplyOuterProducts()(gm)
    assert result.matches == 1
    result.gm.recompile()
    assert "mul" in targets(result.gm)
    assert not {"matmul", "bmm"} & set(targets(result.gm))
    assert torch.equal(run(result.gm), before)


def test_products_that_add_up_stay():
    builder = GraphBuilder()
    x = builder.embed()
    mixed = builder.call(torch.matmul, x, builder.weight("mix", HIDDEN, HIDDEN))
    row = builder.method("view", builder.method("float", builder.positions), 1, builder.size_inputs["T"])
    over_tokens = builder.call(torch.matmul, row, mixed)  # [1, T] times [T, HIDDEN]: T may be 1 in some step
    gm = builder.canonical(builder.head(builder.call(torch.add, x, over_tokens)))
    assert MultiplyOuterProducts()(gm).matches == 0
    assert targets(gm).count("matmul") == 2


def test_integers_are_left_alone():
    builder = GraphBuilder()
    tokens = builder.size_inputs["T"]
    column, row = (builder.method("view", builder.positions, *shape) for shape in ((tokens, 1), (1, tokens)))
    total = builder.method("float", builder.method("sum", builder.call(torch.matmul, column, row)))
    gm = builder.canonical(builder.head(builder.call(torch.add, builder.embed(), total)))
    assert MultiplyOuterProducts()(gm).matches == 0
