"""pack_projections: which linears become one, and where their weights are in it."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from mllm_compile.passes.base import PACKED_WEIGHTS, PackedPart
from mllm_compile.passes.match.nodes import LINEAR
from mllm_compile.passes.pack_projections import PackProjections
from tests.passes.support.graph_builder import (
    HIDDEN,
    GraphBuilder,
    apply,
    assert_values_hold,
    model_of_layers,
    placeholders,
    run,
    targets,
    text,
)


def joined(builder: GraphBuilder, *nodes: fx.Node) -> fx.GraphModule:
    """A model whose head reads all of `nodes`."""
    return builder.canonical(builder.head(builder.call(torch.cat, list(nodes), -1)))


def gate_and_up(gate_bias: bool = False, up_bias: bool = False) -> fx.GraphModule:
    builder = GraphBuilder()
    x = builder.embed()
    return joined(
        builder, builder.linear(x, "mlp.gate", HIDDEN, gate_bias), builder.linear(x, "mlp.up", 2 * HIDDEN, up_bias)
    )


def test_linears_of_one_input_become_one_over_stacked_rows():
    builder, logits = model_of_layers(1)
    result = PackProjections()(builder.canonical(logits))
    assert result.matches == 1
    assert targets(result.gm).count("linear") == 3, "qkv, o, head"
    assert result.gm.meta[PACKED_WEIGHTS] == {
        "layers.0.attn.q+k+v.weight": (
            PackedPart("layers.0.attn.q.weight", 0, 16),
            PackedPart("layers.0.attn.k.weight", 16, 8),
            PackedPart("layers.0.attn.v.weight", 24, 8),
        )
    }
    assert placeholders(result.gm)[4:] == ["layers_0_attn_q_k_v_weight", "layers_0_attn_o_weight", "head_weight"]


def test_biases_are_packed_along():
    gm = apply(PackProjections(), gate_and_up(gate_bias=True, up_bias=True))
    assert list(gm.meta[PACKED_WEIGHTS]) == ["mlp.gate+up.weight", "mlp.gate+up.bias"]


@pytest.mark.parametrize(("gate_bias", "start", "rows"), [(True, 0, HIDDEN), (False, HIDDEN, 2 * HIDDEN)])
def test_a_linear_without_a_bias_has_zeros_in_that_of_others(gate_bias, start, rows):
    gm = apply(PackProjections(), gate_and_up(gate_bias=gate_bias, up_bias=not gate_bias))
    name = "mlp.gate.bias" if gate_bias else "mlp.up.bias"
    assert gm.meta[PACKED_WEIGHTS]["mlp.gate+up.bias"] == (PackedPart(name, start, rows),)
    of_name = {node.meta.get("weight_name"): node for node in gm.graph.find_nodes(op="placeholder")}
    assert of_name["mlp.gate+up.bias"].meta["val"].shape == (3 * HIDDEN,)


def tied_weights(builder: GraphBuilder) -> list[fx.Node]:
    x, weight = builder.embed(), builder.weight("tied.weight", HIDDEN, HIDDEN)
    return [builder.call(LINEAR, x, weight, None) for _ in range(2)]


def one_row_gates(builder: GraphBuilder) -> list[fx.Node]:
    x = builder.embed()
    return [builder.linear(x, name, 1) for name in ("a", "b")]


def different_inputs(builder: GraphBuilder) -> list[fx.Node]:
    x = builder.embed()
    return [builder.linear(x, "a", HIDDEN), builder.linear(builder.call(torch.relu, x), "b", HIDDEN)]


def on_both_sides_of_an_attention(builder: GraphBuilder) -> list[fx.Node]:
    x = builder.embed()
    q = builder.linear(x, "q", HIDDEN)
    return [builder.attention(q, q, q), builder.linear(x, "b", HIDDEN)]


def computed_weights(builder: GraphBuilder) -> list[fx.Node]:
    x = builder.embed()
    weights = [builder.call(torch.neg, builder.weight(name, HIDDEN, HIDDEN)) for name in ("a", "b")]
    return [builder.call(LINEAR, x, weight, None) for weight in weights]


@pytest.mark.parametrize(
    "linears",
    [
        tied_weights,
        one_row_gates,
        different_inputs,
        on_both_sides_of_an_attention,
        computed_weights,
    ],
)
def test_it_leaves_alone_what_cannot_be_one_gemm_or_gains_nothing(linears):
    builder = GraphBuilder()
    gm = joined(builder, *linears(builder))
    before = text(gm)
    assert PackProjections()(gm).matches == 0
    gm.recompile()
    assert text(gm) == before


def test_outputs_and_input_with_several_readers_keep_them_all():
    builder = GraphBuilder()
    x = builder.embed()
    a, b = (builder.linear(x, name, HIDDEN) for name in "ab")
    gm = joined(builder, a, b, builder.call(torch.mul, a, b), x, a)
    before = run(gm)
    gm = apply(PackProjections(), gm)
    assert targets(gm).count("linear") == 2, "a and b, head"
    torch.testing.assert_close(run(gm), before)


def test_what_follows_from_a_part_is_known_to_be_a_part_of_wider_rows():
    """Pieces are compiled for the strides of their inputs."""
    builder = GraphBuilder()
    x = builder.embed()
    gate, up = builder.linear(x, "mlp.gate", HIDDEN), builder.linear(x, "mlp.up", HIDDEN)
    heads = builder.method("view", gate, -1, 2, HIDDEN // 2)
    doubled = builder.call(torch.mul, builder.method("view", heads, -1, HIDDEN), 2.0)
    gm = apply(PackProjections(), joined(builder, doubled, up))
    assert_values_hold(gm)
    views = [node.meta["val"].stride(0) for node in gm.graph.nodes if node.target == "view"]
    assert views == [2 * HIDDEN] * 2
