"""query_factor: which factors of queries become attention's scale, and that the numbers stay."""

from __future__ import annotations

import operator

import pytest
import torch

from mllm_compile.passes.base import ATTENTION_LAYERS, CROSS_LAYERS
from mllm_compile.passes.lower_attention import LowerAttention
from tests.passes.support.graph_builder import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    GraphBuilder,
    apply,
    assert_values_hold,
    run,
    targets,
)

SCALE = 0.5  # GraphBuilder's


def graph(factor: float, reads_product: bool = False):
    """Attention of queries times a factor, which the head may read too."""
    builder = GraphBuilder()
    x = builder.embed()
    q = builder.call(operator.mul, builder.linear(x, "q", HIDDEN), factor)
    k, v = (builder.linear(x, part, KV_HEADS * HEAD_DIM) for part in "kv")
    out = builder.attention(q, k, v)
    return builder.canonical(builder.head(builder.call(operator.add, out, q) if reads_product else out))


@pytest.mark.parametrize("factor", [0.125, 2.0])
def test_a_power_of_two_becomes_part_of_the_scale(factor):
    gm = graph(factor)
    before = run(gm)
    gm = apply(LowerAttention(), gm)
    assert [layer.sm_scale for layer in gm.meta[ATTENTION_LAYERS]] == [SCALE * factor]
    assert "mul" not in targets(gm)
    assert_values_hold(gm)
    torch.testing.assert_close(run(gm), before, rtol=0, atol=0)


@pytest.mark.parametrize("gm", [graph(0.3), graph(-0.5), graph(0.125, reads_product=True)], ids=["0.3", "-0.5", "read"])
def test_other_factors_and_queries_that_others_read_stay(gm):
    gm = apply(LowerAttention(), gm)
    assert [layer.sm_scale for layer in gm.meta[ATTENTION_LAYERS]] == [SCALE] and "mul" in targets(gm)


def test_so_does_one_of_attention_to_an_encoders_states():
    builder = GraphBuilder()
    q = builder.call(operator.mul, builder.linear(builder.embed(), "q", HIDDEN), 0.25)
    heads = builder.method("view", q, builder.size_inputs["T"], HEADS, HEAD_DIM)
    out = builder.call(torch.ops.mllm.cross_attention.default, heads, HEADS, HEAD_DIM, HEAD_DIM, 1.0, 0.0, "")
    gm = builder.lowered(builder.head(builder.method("flatten", out, 1)))
    assert [layer.sm_scale for layer in gm.meta[CROSS_LAYERS]] == [0.25] and "mul" not in targets(gm)
