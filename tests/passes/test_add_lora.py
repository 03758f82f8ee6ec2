"""add_lora: which linears add what adapters change, and where the factors are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from mllm_compile.passes.add_lora import AddLora
from mllm_compile.passes.base import (
    EXPERT_RANKS,
    LORA,
    LORA_LAYOUT,
    WEIGHT_CUTS,
    WEIGHT_FACTORS,
    LoraWish,
    WeightCut,
    WeightFactor,
)
from mllm_compile.passes.match.experts import match_expert_linear
from mllm_compile.passes.match.nodes import LINEAR, is_op
from mllm_compile.passes.pack_projections import PackProjections
from mllm_compile.passes.spread_experts import SpreadExperts
from mllm_compile.runtime.lora.target import LoraBuffers, LoraLayout
from tests.passes.support.every_graph import decoder_of_experts
from tests.passes.support.graph_builder import HIDDEN, VOCAB, GraphBuilder, apply, model_of_layers, text

QKV = "layers.0.attn.q+k+v.weight"


def told(gm: fx.GraphModule, *weights: str) -> fx.GraphModule:
    gm.meta[LORA] = LoraWish(frozenset(weights), num_slots=3, max_rank=4)
    return gm


def model(*weights: str) -> fx.GraphModule:
    builder, logits = model_of_layers(1)
    return told(apply(PackProjections(), builder.canonical(logits)), *weights)


def added(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if is_op(node, "add_lora")]


def layout(gm: fx.GraphModule) -> LoraLayout:
    found: LoraLayout = gm.meta[LORA_LAYOUT]
    return found


def test_a_part_of_a_packed_linear_has_rows_of_its_own():
    gm = apply(AddLora(), model("layers.0.attn.q.weight", "layers.0.attn.v.weight"))
    (node,) = added(gm)
    assert node.args[5:] == ([0, 24], [16, 8])
    assert [tuple(arg.meta["val"].shape) for arg in node.args[2:4]] == [(3, 8, HIDDEN), (3, 24, 4)]
    assert layout(gm).buffers == (LoraBuffers(QKV, 8, HIDDEN, 24),)
    places = [(one.weight, one.linear, one.part, one.start, one.rows) for one in layout(gm).targets]
    assert places == [("layers.0.attn.q.weight", QKV, 0, 0, 16), ("layers.0.attn.v.weight", QKV, 1, 16, 8)]
    assert set(node.args[0].users) == {node}, "nothing reads the linear without it"
    assert AddLora()(gm).matches == 0


def test_without_adapters_the_graph_stays():
    builder, logits = model_of_layers(1)
    gm = builder.canonical(logits)
    before = text(gm)
    result = AddLora()(gm)
    assert (result.matches, text(result.gm)) == (0, before)
    assert LORA_LAYOUT not in gm.meta


def test_the_head_takes_the_slots_of_its_rows():
    gm = apply(AddLora(), model("head.weight"))
    (node,) = added(gm)
    slots, index = node.args[4].args
    assert (slots.meta["input_name"], index[0].meta["input_name"]) == ("adapter_slots", "logits_indices")
    assert node.args[4].meta["val"].shape == index[0].meta["val"].shape
    (target,) = layout(gm).targets
    assert (target.kind, target.outputs, target.inputs) == ("head", VOCAB, HIDDEN)


def test_an_embedding_takes_a_row_of_the_first_factor_for_each_id():
    gm = apply(AddLora(), model("embed.weight"))
    (node,) = (one for one in gm.graph.nodes if is_op(one, "add_lora_of_ids"))
    assert [tuple(arg.meta["val"].shape) for arg in node.args[2:4]] == [(3, VOCAB, 4), (3, HIDDEN, 4)]
    (target,) = layout(gm).targets
    assert (target.kind, target.outputs, target.inputs) == ("embedding", HIDDEN, VOCAB)


@pytest.mark.parametrize("is_head", [False, True], ids=["embedding", "head"])
def test_of_tied_weights_each_reader_has_factors_of_its_own(is_head):
    builder = GraphBuilder()
    x = builder.embed()
    rows = builder.call(torch.index_select, x, 0, builder.rows)
    tied = next(node for node in builder.graph.nodes if node.meta.get("weight_name") == "embed.weight")
    gm = builder.canonical(builder.call(LINEAR, rows, tied, None))
    wanted = "head.weight" if is_head else "embed.weight"
    gm.meta[LORA] = LoraWish(frozenset({wanted}), 3, 4, embedding="embed.weight", tied_head="head.weight")
    gm = apply(AddLora(), gm)
    (target,) = layout(gm).targets
    assert (target.weight, target.linear, target.stored_in) == (wanted, wanted, "embed.weight")
    assert target.kind == ("head" if is_head else "embedding")


def test_weights_that_a_scale_is_in_are_left_alone():
    gm = model("layers.0.attn.v.weight", "layers.0.attn.o.weight")
    gm.meta[WEIGHT_FACTORS] = {"layers.0.attn.v.weight": WeightFactor("v_scale", is_divided=True)}
    assert [one.weight for one in layout(apply(AddLora(), gm)).targets] == ["layers.0.attn.o.weight"]


def test_a_linear_of_another_type_than_the_first_is_left_alone():
    builder = GraphBuilder()
    x = builder.linear(builder.embed(), "up", HIDDEN)
    router = builder.weight("router.weight", HIDDEN, HIDDEN, dtype=torch.float64)
    chosen = builder.call(LINEAR, builder.method("double", x), router, None)
    gm = builder.canonical(builder.head(builder.method("float", chosen)))
    gm = apply(AddLora(), told(gm, "up.weight", "router.weight"))
    assert [one.weight for one in layout(gm).targets] == ["up.weight"]
    assert layout(gm).dtype == "float32"


def test_linears_that_share_a_weight_share_its_factors():
    builder = GraphBuilder()
    x, weight = builder.embed(), builder.weight("tied.weight", HIDDEN, HIDDEN)
    twice = builder.call(LINEAR, builder.call(LINEAR, x, weight, None), weight, None)
    gm = apply(AddLora(), told(builder.canonical(builder.head(twice)), "tied.weight"))
    first, second = added(gm)
    assert first.args[2:5] == second.args[2:5]
    assert len(layout(gm).targets) == 1


def test_a_rank_has_its_part_of_the_factors():
    gm = model("layers.0.attn.o.weight")
    cut = WeightCut(1, (((0, HIDDEN),), ((HIDDEN, HIDDEN),)))
    gm.meta[WEIGHT_CUTS] = {"layers.0.attn.o.weight": (cut,)}
    (target,) = layout(apply(AddLora(), gm)).targets
    assert (target.outputs, target.inputs) == (HIDDEN, 2 * HIDDEN)
    assert (target.output_ranges, target.input_ranges) == ((), cut.ranges)


def test_an_input_says_which_adapter_each_token_has():
    gm = apply(AddLora(), model("layers.0.attn.o.weight"))
    (node,) = (one for one in gm.graph.nodes if one.meta.get("input_name") == "adapter_slots")
    tokens = next(one for one in gm.graph.nodes if one.meta.get("input_name") == "input_ids")
    assert node.meta["val"].dtype == torch.int32
    assert node.meta["val"].shape == tokens.meta["val"].shape


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_experts_of_a_rank_take_the_slots_of_all_tokens(num_ranks):
    gm = decoder_of_experts()
    gm.meta[EXPERT_RANKS] = num_ranks
    gm = apply(SpreadExperts(), gm)
    weights = {one.weight.meta["weight_name"] for one in map(match_expert_linear, gm.graph.nodes) if one is not None}
    gm = apply(AddLora(), told(gm, *weights))
    changed = [node for node in gm.graph.nodes if is_op(node, "add_lora_of_experts")]
    assert all(node.args[4].meta["val"].shape[0] == node.args[5].meta["val"].shape[0] for node in changed)
    gathers = {node.args[4] for node in changed if is_op(node.args[4], "all_gather")}
    choices = {node.args[5] for node in changed}
    assert len(gathers) == (0 if num_ranks == 1 else len(choices)), "one a layer"
    for target in layout(gm).targets:
        a = next(node for node in gm.graph.nodes if node.meta.get("weight_name") == f"lora_A.{target.linear}")
        assert a.meta["val"].shape[1] * num_ranks == target.num_experts * 4
        assert len(target.expert_ranges) == (0 if num_ranks == 1 else num_ranks)


def test_scales_are_of_all_outputs_of_a_packed_linear_and_come_before_what_is_added():
    gm = model("layers.0.attn.q.weight", "layers.0.attn.v.weight")
    gm.meta[LORA] = replace(gm.meta[LORA], has_scales=True)
    gm = apply(AddLora(), gm)
    (node,) = added(gm)
    scaled = node.args[0]
    assert is_op(scaled, "scale_of_adapters")
    assert set(scaled.args[0].users) == {scaled}, "nothing reads the linear without them"
    (buffers,) = layout(gm).buffers
    assert scaled.args[1].meta["val"].shape == (3, buffers.scales) == (3, 32)
    assert [target.stored_start for target in layout(gm).targets] == [0, 24]
