"""lower_attention: the runtime's op in place of the trace-time one, and what each layer is told."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.passes.base import ATTENTION_LAYERS
from mllm_compile.passes.lower_attention import LowerAttention
from mllm_compile.runtime.attention.layer import LayerSpec
from tests.passes.support.graph_builder import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    GraphBuilder,
    apply,
    run,
    targets,
    text,
)


def layers_of(gm) -> list[LayerSpec]:
    return gm.meta[ATTENTION_LAYERS]


def test_the_op_is_lowered_and_its_arguments_become_the_layers():
    builder = GraphBuilder()
    x = builder.layer(builder.embed(), 0, sm_scale=0.25, logits_soft_cap=30.0, window_left=4)
    result = LowerAttention()(builder.canonical(builder.head(x)))
    assert result.matches == 1
    assert targets(result.gm)[-7:-4] == ["new_empty.default", "attention_with_output.default", "flatten"]
    assert layers_of(result.gm) == [
        LayerSpec("layers.0.attn", 0, HEADS, 2, HEAD_DIM, HEAD_DIM, 0.25, 30.0, 4, sinks=None)
    ]


def test_sinks_are_the_layers_and_stay_a_weight_of_the_graph():
    builder = GraphBuilder()
    x = builder.layer(builder.embed(), 0, sinks=builder.weight("layers.0.sinks", HEADS))
    gm = builder.lowered(builder.head(x))
    assert layers_of(gm)[0].sinks == "layers.0.sinks"
    assert "layers.0.sinks" in [node.meta.get("weight_name") for node in gm.graph.nodes]


def test_slopes_are_the_layers():
    builder = GraphBuilder()
    slopes = [0.5, 0.25, 0.125, 1.0]
    gm = builder.canonical(builder.head(builder.layer(builder.embed(), 0, alibi_slopes=slopes)))
    before = run(gm)
    gm = apply(LowerAttention(), gm)
    assert layers_of(gm)[0].alibi_slopes == tuple(slopes)
    torch.testing.assert_close(run(gm), before, rtol=0, atol=0)


def test_a_graph_without_attention_is_left_alone():
    builder = GraphBuilder()
    gm = builder.canonical(builder.head(builder.embed()))
    before = text(gm)
    assert LowerAttention()(gm).matches == 0
    assert text(gm) == before
    assert layers_of(gm) == []


def test_names_are_one_a_call_also_for_a_module_that_attends_twice_or_has_no_name():
    builder = GraphBuilder()
    q = builder.linear(builder.embed(), "q", HIDDEN)
    for module in ("layers.0.attn", "layers.0.attn", None, None):
        q = builder.attention(q, q, q, module)
    names = [layer.name for layer in layers_of(builder.lowered(builder.head(q)))]
    assert names == ["layers.0.attn", "layers.0.attn#1", "attention.2", "attention.3"]


def test_an_output_with_several_readers_keeps_them_all():
    builder = GraphBuilder()
    q = builder.linear(builder.embed(), "q", HIDDEN)
    out = builder.attention(q, q, q)
    total = builder.call(torch.add, builder.call(torch.mul, out, q), out)
    gm = builder.canonical(builder.head(total))
    before = run(gm)
    torch.testing.assert_close(run(apply(LowerAttention(), gm)), before, rtol=0, atol=0)


@pytest.mark.parametrize("said", [{}, {"window_left": 2, "logits_soft_cap": 5.0}])
def test_numbers_are_those_of_the_trace_time_op(said):
    builder = GraphBuilder()
    x = builder.layer(builder.layer(builder.embed(), 0, **said), 1)
    gm = builder.canonical(builder.head(x))
    before = run(gm)
    torch.testing.assert_close(run(apply(LowerAttention(), gm)), before, rtol=0, atol=0)
