"""Experts that are dealt to ranks: each rank's numbers equal one's with all experts, on tokens of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx

from mllm_compile.passes.base import EXPERT_RANKS, WEIGHT_CUTS, PassTarget
from mllm_compile.passes.match import nodes
from mllm_compile.passes.match.nodes import is_op
from mllm_compile.passes.pipeline import passes_left_out, run_passes
from mllm_compile.passes.spread_experts import SpreadExperts
from mllm_compile.runtime.collectives.lockstep import run_lockstep
from tests.model.tiny_configs import tiny_config
from tests.passes.support.every_graph import decoder_of_experts, decoder_of_experts_with_biases, layers
from tests.passes.support.graph_builder import run, text
from tests.passes.support.lockstep import Cut, canonical_graph, spread
from tests.passes.support.stand_ins import ALL, stand_in_ops, streamed_ops_on_cpu
from tests.passes.test_every_pass import variants_for

LARGEST_ERROR = 1e-5  # of float32 logits
# Models that share or group experts, add biases, read weights through views, count choices, or carry states.
NAMES = (
    "dbrx",
    "deepseek_v3",
    "gpt_oss",
    "granitemoehybrid",
    "jetmoe",
    "minimax_m2",
    "nemotron_h",
    "qwen3_next",
    "zaya",
)


def spread_model(name: str, num_ranks: int) -> Cut:
    gm, constants = canonical_graph(tiny_config(name))
    return spread(gm, num_ranks, constants)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_compute_what_one_does_of_their_own_tokens(name, num_ranks):
    found = spread_model(name, num_ranks)
    assert found.error < LARGEST_ERROR
    assert found.calls["reduce_scatter"] == found.calls["rank_index"] > 0
    assert all(one.dim == 0 and len(set(one.ranges)) == num_ranks for (one,) in found.cuts.values())


def test_four_ranks_have_an_expert_each_and_gather_what_these_read():
    found = spread_model("qwen3_moe", 4)
    assert found.error < LARGEST_ERROR
    layers = tiny_config("qwen3_moe").num_hidden_layers
    # A router reads what its experts read: a layer gathers that alone.
    assert found.calls == {"all_gather": layers, "reduce_scatter": layers, "rank_index": layers}
    assert {one.ranges for (one,) in found.cuts.values()} == {tuple(((rank, 1),) for rank in range(4))}


def test_experts_that_do_not_divide_are_whole_on_every_rank():
    gm = decoder_of_experts()
    before = text(gm)
    gm.meta[EXPERT_RANKS] = 7
    assert SpreadExperts()(gm).matches == 0
    assert (text(gm), gm.meta[WEIGHT_CUTS]) == (before, {})


def test_the_pass_does_nothing_the_second_time_nor_for_one_rank_nor_without_experts():
    gm = decoder_of_experts()
    before = text(gm)
    assert SpreadExperts()(gm).matches == 0
    assert text(gm) == before
    dense = layers()
    dense.meta[EXPERT_RANKS] = 2
    assert SpreadExperts()(dense).matches == 0


def test_the_pass_is_there_for_spread_experts_alone():
    target = PassTarget("cpu", True, False, False, "float32", "float32")
    assert "expert_parallel_size is 1" in passes_left_out(target)["spread_experts"]
    several = PassTarget("cpu", True, False, False, "float32", "float32", num_expert_ranks=2)
    left_out = passes_left_out(several)
    assert "spread_experts" not in left_out
    assert {"shard", "gather_rows_early"} <= set(left_out)


@pytest.fixture(scope="module")
def kernels_on_cpu() -> Iterator[None]:
    with streamed_ops_on_cpu(), stand_in_ops(ALL), pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "KERNEL_DTYPES", (torch.bfloat16, torch.float16, torch.float32))
        yield


@pytest.mark.parametrize(("graph", "num_tokens"), [(decoder_of_experts, 7), (decoder_of_experts_with_biases, 1)])
def test_two_ranks_compute_what_one_does_behind_all_passes(kernels_on_cpu, graph, num_tokens):
    whole = [run(graph(), num_tokens, seed) for seed in range(2)]
    gm = graph()
    gm.meta[EXPERT_RANKS] = 2
    gm, _ = run_passes(gm, left_out={"gather_rows_early"})
    assert len(gm.meta[WEIGHT_CUTS]) == 4 * (1 + (graph is decoder_of_experts_with_biases))
    with variants_for(gm, num_tokens):
        found = run_lockstep(2, lambda rank: run(gm, num_tokens, rank))
    for one, other in zip(found, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))
    pieces = [module for _, module in gm.named_children() if isinstance(module, fx.GraphModule)]
    ops = [node for piece in pieces for node in piece.graph.nodes]
    assert any(is_op(node, "reduce_scatter") for node in ops)
    assert any(is_op(node, "order_experts") for node in ops)
    assert not any(is_op(node, "stream_expert_up") for node in ops)  # which chooses among a rank's own alone
