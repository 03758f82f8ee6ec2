"""passes/count_experts.py: one counter for each layer's choice, which all its linears read behind."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.compiler.program_builder import build_program
from mllm_compile.passes.base import EXPERT_RANKS, PassTarget
from mllm_compile.passes.count_experts import CountExperts
from mllm_compile.passes.match.nodes import called_pieces, is_op
from mllm_compile.passes.pipeline import passes_left_out
from mllm_compile.passes.spread_experts import chosen_of_all
from mllm_compile.runtime.forward_context import ForwardContext, override_forward_context
from mllm_compile.runtime.ops import op
from tests.passes.support.every_graph import decoder_of_experts, layers
from tests.passes.support.graph_builder import run
from tests.passes.support.stand_ins import FOR_GPUS

TARGET = PassTarget("cpu", True, False, False, "float32", "float32")


def counted(make, num_ranks=1):
    gm = make()
    gm.meta[EXPERT_RANKS] = num_ranks
    for graph_pass in FOR_GPUS:
        if not graph_pass.needs:
            gm = graph_pass()(gm).gm
    gm.recompile()
    return gm


def test_each_layer_has_one_counter_and_both_linears_read_what_it_gives():
    gm = counted(decoder_of_experts)
    found = 0
    for name in called_pieces(gm):
        nodes = list(gm.get_submodule(name).graph.nodes)
        counters = [node for node in nodes if is_op(node, "count_experts")]
        for counter in counters:
            assert [is_op(user, "expert_linear") for user in counter.users] == [True, True]
            found += 1
    assert found == 2
    assert build_program(gm).counted_experts == ("layers.0.experts.up", "layers.1.experts.up")
    torch.testing.assert_close(run(gm, 7), run(decoder_of_experts(), 7))


def test_where_experts_are_spread_the_choice_among_all_is_counted_of_all_ranks_tokens():
    gm = counted(decoder_of_experts, num_ranks=2)
    found = 0
    for name in called_pieces(gm):
        for counter in (node for node in gm.get_submodule(name).graph.nodes if is_op(node, "count_experts")):
            ids, slots = counter.args
            assert slots.target == "token_all_slots"
            assert list(ids.users) == [counter], "all that is made of the choice is made of what was counted"
            linears = [node for node in gm.get_submodule(name).graph.nodes if is_op(node, "expert_linear")]
            assert counter in {chosen_of_all(node.args[1]) for node in linears}
            found += 1
    assert found == 2
    assert CountExperts()(gm).matches == 0


def test_a_dense_model_has_none():
    assert CountExperts()(counted(layers)).matches == 0


def test_it_is_left_out_unless_the_config_asks_for_it():
    assert "neither runtime.expert_stats nor routed_experts is set" in passes_left_out(TARGET)["count_experts"]
    asked = PassTarget("cpu", True, False, False, "float32", "float32", counts_experts=True)
    assert "count_experts" not in passes_left_out(asked)


def test_padding_and_ids_of_no_expert_are_not_counted():
    counts = {name: torch.zeros(4, dtype=torch.int64) for name in ("first", "second")}
    context = ForwardContext({}, {}, {}, all_moe_layers=tuple(counts), expert_counts=counts)
    ids, slots = torch.tensor([[0, 1], [3, 9], [-1, 2], [1, 1]]), torch.tensor([5, 6, 7, 0])
    with override_forward_context(context):
        assert torch.equal(op("count_experts")(ids, slots), ids)
        op("count_experts")(ids[:1], slots[:1])
        with pytest.raises(IndexError):
            op("count_experts")(ids, slots)
    assert {name: one.tolist() for name, one in counts.items()} == {"first": [1, 1, 1, 1], "second": [1, 1, 0, 0]}


def test_where_nobody_counts_the_ids_are_given_on():
    ids = torch.tensor([[0, 1]])
    with override_forward_context(ForwardContext({}, {}, {})):
        given = op("count_experts")(ids, torch.tensor([1]))
    assert torch.equal(given, ids) and given.data_ptr() != ids.data_ptr()
