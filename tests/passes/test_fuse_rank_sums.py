"""fuse_rank_sums: which sums over ranks get the residual and the norm behind them, and that numbers stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import fx

from mllm_compile.passes.base import RANKS, PassTarget
from mllm_compile.passes.fuse_rank_sums import FuseRankSums
from mllm_compile.passes.match import nodes
from mllm_compile.passes.match.nodes import is_op
from mllm_compile.passes.pipeline import pass_names, passes_left_out, run_passes
from mllm_compile.runtime.collectives.lockstep import run_lockstep
from tests.passes.support.every_graph import decoder_in_float16, decoder_with_normed_heads
from tests.passes.support.graph_builder import assert_values_hold, run, text
from tests.passes.support.stand_ins import ALL, stand_in_ops, streamed_ops_on_cpu
from tests.passes.test_every_pass import variants_for

NUM_RANKS = 2


@pytest.fixture(scope="module", autouse=True)
def kernels_on_cpu() -> Iterator[None]:
    with streamed_ops_on_cpu(), stand_in_ops(ALL):
        yield


def cut(gm: fx.GraphModule, *left_out: str) -> fx.GraphModule:
    gm.meta[RANKS] = NUM_RANKS
    return run_passes(gm, left_out)[0]


def cut_pieces(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph as it is ahead of the pass."""
    names = pass_names()
    return cut(gm, *names[names.index(FuseRankSums.name) :])


def count(gm: fx.GraphModule, name: str) -> int:
    pieces = [module for _, module in gm.named_children() if isinstance(module, fx.GraphModule)]
    return sum(is_op(node, name) for piece in pieces for node in piece.graph.nodes)


def test_sums_with_a_norm_behind_them_are_fused_and_others_stay():
    gm = cut_pieces(decoder_with_normed_heads())
    sums = count(gm, "all_reduce")
    matches = FuseRankSums()(gm).matches
    assert matches > 2
    assert count(gm, "all_reduce_residual_norm") == matches
    assert count(gm, "all_reduce") == sums - matches
    run_lockstep(NUM_RANKS, lambda rank: assert_values_hold(gm))
    once = text(gm)
    assert FuseRankSums()(gm).matches == 0
    assert text(gm) == once


def test_other_types_than_bfloat16_are_left_alone():
    gm = cut_pieces(decoder_in_float16())
    before = text(gm)
    assert FuseRankSums()(gm).matches == 0
    assert text(gm) == before


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_numbers_stay_in_pieces_and_their_variants(num_tokens):
    whole = run(decoder_with_normed_heads(), num_tokens)
    gm = cut(decoder_with_normed_heads())
    with variants_for(gm, num_tokens):
        found = run_lockstep(NUM_RANKS, lambda rank: run(gm, num_tokens))
    assert count(gm, "all_reduce_residual_norm")
    for logits in found:
        torch.testing.assert_close(logits, whole, rtol=0.05, atol=0.05 * float(whole.abs().max()))


def test_the_pass_is_for_several_ranks_on_hopper():
    one = PassTarget(nodes.KERNEL_DEVICE_TYPE, True, True, True, "bfloat16", "bfloat16")
    assert passes_left_out(one)["fuse_rank_sums"] == "runtime.tensor_parallel_size is 1"
    assert "fuse_rank_sums" not in passes_left_out(replace(one, num_ranks=2))
    without = passes_left_out(replace(one, num_ranks=2, compiles_cuda=False))
    assert "CUDA C++ for Hopper" in without["fuse_rank_sums"]
