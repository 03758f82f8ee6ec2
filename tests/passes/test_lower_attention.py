"""lower_attention: the runtime's op in place of the trace-time one, and what each layer is told."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.passes.base import ATTENTION_LAYERS, STATE_LAYERS
from mllm_compile.passes.lower_attention import LowerAttention
from mllm_compile.passes.split_at_attention import SplitAtAttention
from mllm_compile.passes.verify import verify_graph
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.state.layer import CausalConv, GatedDelta, StateLayer
from tests.passes.support.graph_builder import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    GraphBuilder,
    apply,
    done,
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
def test_numbers_match_the_trace_time_op(said):
    builder = GraphBuilder()
    x = builder.layer(builder.layer(builder.embed(), 0, **said), 1)
    gm = builder.canonical(builder.head(x))
    before = run(gm)
    torch.testing.assert_close(run(apply(LowerAttention(), gm)), before, rtol=0, atol=0)


def test_a_layer_with_a_state_is_lowered_beside_attention_and_cut_out_of_the_pieces():
    builder = GraphBuilder()
    x = builder.linear(builder.embed(), "in", HIDDEN)
    bias = builder.weight("bias", HIDDEN)
    x = builder.call(torch.ops.mllm.causal_conv.default, x, builder.weight("conv", HIDDEN, 4), bias, "silu", "")
    heads = builder.method("view", x, builder.size_inputs["T"], HEADS, HEAD_DIM)
    gates = builder.linear(x, "gates", HEADS)
    op = torch.ops.mllm.gated_delta.default
    for _ in range(2):
        heads = builder.call(op, heads, heads, heads, gates, gates, None, None, None, None, True, 0.0, "", "")
    gm = builder.lowered(builder.head(builder.layer(builder.method("flatten", heads, 1), 0)))
    float32 = {"out_dtype": "float32", "dtype": "float32"}
    conv = StateLayer(
        "causal_conv.0", 0, CausalConv("silu"), ("x", "weight", "bias"), (3, HIDDEN), (HIDDEN,), **float32
    )
    delta = StateLayer(
        "gated_delta.1",
        *(1, GatedDelta(qk_l2norm=True), ("q", "k", "v", "g", "beta")),
        *((HEADS, HEAD_DIM, HEAD_DIM), (HEADS, HEAD_DIM)),
        **float32,
    )
    layers = gm.meta[STATE_LAYERS]
    assert layers[:2] == [conv, delta] and layers[2].name == "gated_delta.2"
    assert [layer.layer_id for layer in layers_of(gm)] == [0]
    gm = apply(SplitAtAttention(), gm)
    verify_graph(gm, done("split_at_attention"))
    called = [name.partition("_")[0] for name in targets(gm) if name.startswith(("piece", "state", "attention"))]
    assert called == ["piece", "state", "piece", "state", "state", "piece", "attention", "piece", "piece"]
