"""pack_linears: which linears it takes, which weights lie in panels, and that numbers stay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from mllm_compile.passes.base import (
    HAS_AMX,
    PACKED_WEIGHTS,
    PANELS,
    WEIGHT_SCHEMES,
    PackedPart,
    PassTarget,
    WeightSchemes,
)
from mllm_compile.passes.match.experts import match_expert_linear
from mllm_compile.passes.match.nodes import LINEAR
from mllm_compile.passes.pack_linears import PackLinears
from mllm_compile.passes.quantise_linears import QuantiseLinears
from mllm_compile.runtime.quantised.scheme import WeightScheme
from tests.passes.support.every_graph import EXPERTS, decoder_of_experts, decoder_of_experts_with_biases
from tests.passes.support.graph_builder import HIDDEN, GraphBuilder, assert_values_hold, model_of_layers, run, targets

CPU = PassTarget("cpu", True, False, False, "float32", "float32", has_panels=True)


def feed_forward(rows: int = 48, bias: bool = True):
    builder = GraphBuilder()
    wide = builder.linear(builder.embed(), "up", rows, bias)
    return builder.canonical(builder.head(builder.linear(wide, "down", HIDDEN)))


def tied():
    builder = GraphBuilder()
    table = builder.weight("embed.weight", 32, HIDDEN)
    x = builder.layer(builder.call(functional.embedding, builder.token_ids, table), 0)
    return builder.canonical(builder.call(LINEAR, builder.call(torch.index_select, x, 0, builder.rows), table, None))


def test_linears_read_panels():
    gm = feed_forward()
    before = run(gm)
    result = PackLinears()(gm)
    result.gm.recompile()
    assert result.matches == 2
    assert gm.meta[PANELS] == {"up.weight": 4, "down.weight": 4}
    assert torch.allclose(run(result.gm), before, atol=1e-5)
    assert_values_hold(result.gm)
    assert PackLinears()(result.gm).matches == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_amx", [False, True])
def test_bfloat16_stays_the_librarys_with_amx(has_amx, dtype):
    gm = feed_forward()
    gm.meta[HAS_AMX] = has_amx
    for node in gm.graph.nodes:
        if isinstance(value := node.meta.get("val"), torch.Tensor) and value.is_floating_point():
            node.meta["val"] = value.to(dtype)
    assert PackLinears()(gm).matches == (0 if has_amx and dtype == torch.bfloat16 else 2)


def test_other_rows_stay():
    gm = feed_forward(rows=40)
    assert PackLinears()(gm).matches == 1  # down; its 40 inputs fill units


def test_a_weight_that_is_read_elsewhere_gets_a_second_input():
    gm = tied()
    before = run(gm)
    result = PackLinears()(gm)
    result.gm.recompile()
    assert gm.meta[PACKED_WEIGHTS] == {"embed.weight in panels": (PackedPart("embed.weight", 0, 32),)}
    assert "embed.weight" not in gm.meta[PANELS]
    assert torch.allclose(run(result.gm), before, atol=1e-5)


@pytest.mark.parametrize(("rounds", "name"), [(True, "rounded_panel_linear"), (False, "integer_panel_linear")])
def test_integers_read_panels_and_a_tied_head_among_them(rounds, name):
    gm = tied()
    names = [f"layers.0.attn.{part}.weight" for part in "qkvo"]
    schemes = dict.fromkeys([*names, "embed.weight"], WeightScheme("int8", HIDDEN))
    gm.meta[WEIGHT_SCHEMES] = WeightSchemes(
        schemes, are_chosen=True, head="head.weight", in_panels=True, rounds_inputs=rounds
    )
    quantised = QuantiseLinears()(gm)
    assert quantised.matches == 3, "q, o and the head: k and v have eight rows"
    result = PackLinears()(quantised.gm)
    result.gm.recompile()
    assert result.matches == 3
    found = targets(result.gm)
    assert found.count(f"{name}.default") == 3 or found.count(name) == 3
    assert {"head.weight", "head.weight_scales"} <= gm.meta[PANELS].keys()
    assert any(node.meta.get("weight_name") == "embed.weight" for node in result.gm.graph.nodes)
    assert_values_hold(result.gm)


@pytest.mark.parametrize(("rounds", "name"), [(True, "rounded"), (False, "integer")])
@pytest.mark.parametrize("make", [decoder_of_experts, decoder_of_experts_with_biases])
def test_experts_read_panels(make, rounds, name):
    gm, up, scheme = make(), "layers.0.experts.up", WeightScheme("int4_offsets", 32, torch.float16)
    where = {"transposed" if make is decoder_of_experts_with_biases else "schemes": {up: scheme}}
    gm.meta[WEIGHT_SCHEMES] = WeightSchemes(**({"schemes": {}} | where), in_panels=True, rounds_inputs=rounds)
    quantised = QuantiseLinears()(gm)
    assert quantised.matches == 1, "panels hold groups of 32, which no other kernel of experts takes"
    quantised.gm.recompile()
    before = run(quantised.gm)
    linears = PackLinears()(quantised.gm)
    linears.gm.recompile()
    assert {up, f"{up}_scales", f"{up}_offsets"} <= gm.meta[PANELS].keys()
    experts = [one for node in linears.gm.graph.nodes if (one := match_expert_linear(node)) is not None]
    assert [(one.num_experts, one.group) for one in experts if one.scales is not None] == [(EXPERTS, 32)]
    assert sum(f"{name}_panel_expert_linear" in one for one in targets(linears.gm)) == 1
    assert_values_hold(linears.gm)
    found = run(linears.gm)
    assert rounds or torch.allclose(found, before, atol=1e-5), "rounded inputs may turn a router's choice"
    assert PackLinears()(linears.gm).matches == 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"device_type": "cuda"}, "GPU"),
        ({"compiles_pieces": False}, "eager"),
        ({"num_ranks": 2}, "ranks"),
        ({"has_panels": False}, "AVX2"),
    ],
)
def test_it_says_where_it_is_of_no_use(change, why):
    assert PackLinears.obstacle(CPU) is None
    assert why in (PackLinears.obstacle(replace(CPU, **change)) or "")


def test_layers_are_packed_behind_projections():
    builder, logits = model_of_layers(2)
    gm = builder.canonical(logits)
    before = run(gm)
    result = PackLinears()(gm)
    result.gm.recompile()
    assert result.matches == 4, "q and o: k, v and the head have other rows"
    assert torch.allclose(run(result.gm), before, atol=1e-5)
