"""passes/dequantise_experts.py: experts in MXFP4 in pieces for many tokens become plain ones, which tiles multiply.

The kernels need a GPU; here their ops are stand-ins in plain torch.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from mllm_compile.passes import dequantise_experts
from mllm_compile.passes.base import NO_CUDA_COMPILER, NO_VARIANTS, VARIANTS, PassTarget
from mllm_compile.passes.dequantise_experts import DequantiseExperts
from mllm_compile.passes.match.nodes import is_op
from tests.passes.support.every_graph import (
    EXPERTS,
    decoder_of_experts_in_bfloat16,
    decoder_of_experts_in_mxfp4,
    experts_with_biases_of_which_some_are_quantised,
)
from tests.passes.support.graph_builder import run
from tests.passes.support.stand_ins import ALL, FOR_GPUS, stand_in_ops, streamed_ops_on_cpu

OPS = ("quantised_grouped_linear", "dequantised_experts", "grouped_linear", "expert_tiles", "stream_expert_rows")
PASSES = ("quantise_linears", "group_experts", "stream_expert_rows", "dequantise_experts", "tile_experts")
TOKENS_OF_EXPERT = 50
LARGEST = TOKENS_OF_EXPERT * EXPERTS


@pytest.fixture(scope="module", autouse=True)
def kernels_on_cpu():
    with streamed_ops_on_cpu(), stand_in_ops(ALL):
        yield


@pytest.fixture(autouse=True)
def few_experts_count_as_many(monkeypatch):
    monkeypatch.setattr(dequantise_experts, "_TOKENS_OF_EXPERT", TOKENS_OF_EXPERT)


def rewritten(make, without: tuple[str, ...] = ()) -> tuple[fx.GraphModule, int]:
    gm, matches = make(), 0
    for graph_pass in FOR_GPUS:
        if not graph_pass.needs or graph_pass.name in set(PASSES) - set(without):
            result = graph_pass()(gm)
            gm, matches = result.gm, result.matches if graph_pass is DequantiseExperts else matches
    gm.recompile()
    return gm, matches


def ops_in(piece) -> list[str]:
    return [name for node in piece.graph.nodes for name in OPS if is_op(node, name)]


def test_pieces_of_many_tokens_multiply_plain_weights_and_their_variants_keep_few_bits():
    gm, matches = rewritten(decoder_of_experts_in_mxfp4)
    assert matches > 0
    for name, variants in gm.meta[VARIANTS].items():
        if ops_in(gm.get_submodule(name)):
            assert ops_in(gm.get_submodule(name)) == 2 * ["dequantised_experts", "expert_tiles"]
            assert sorted(variants) == [1, 64, 256, LARGEST]
            assert ops_in(gm.get_submodule(variants[LARGEST])) == 2 * ["quantised_grouped_linear"]


def test_they_compute_what_was_traced():
    plain, _ = rewritten(decoder_of_experts_in_mxfp4, without=("dequantise_experts",))
    for without in ((), ("tile_experts",)):
        gm, _ = rewritten(decoder_of_experts_in_mxfp4, without)
        for num_tokens in (1, 7):
            torch.testing.assert_close(run(gm, num_tokens), run(plain, num_tokens), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "make", [decoder_of_experts_in_bfloat16, experts_with_biases_of_which_some_are_quantised], ids=["bf16", "float32"]
)
def test_other_weights_stay(make):
    assert rewritten(make)[1] == 0


def test_weights_whose_copy_is_too_large_stay(monkeypatch):
    monkeypatch.setattr(dequantise_experts, "_MOST_BYTES", 1024)
    gm, matches = rewritten(decoder_of_experts_in_mxfp4)
    assert matches == 0
    assert not any(LARGEST in variants for variants in gm.meta[VARIANTS].values())


def test_modes_and_gpus_without_it_say_why():
    target = PassTarget("cuda", True, False, True, "bfloat16", "bfloat16")
    assert DequantiseExperts.obstacle(target) == NO_CUDA_COMPILER
    target = replace(target, compiles_cuda=True)
    assert DequantiseExperts.obstacle(target) is None
    assert DequantiseExperts.obstacle(replace(target, any_rows=True)) == NO_VARIANTS
