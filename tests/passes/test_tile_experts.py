"""passes/tile_experts.py: linears of experts in pieces for many tokens become calls of the tiles' kernels.

The kernels need a Hopper GPU; here their ops are stand-ins in plain torch.
"""

from __future__ import annotations

import pytest
import torch
from torch import fx

from mllm_compile.kernels.cuda import kernels_of
from mllm_compile.passes.base import VARIANTS
from mllm_compile.passes.match.nodes import is_op
from mllm_compile.passes.tile_experts import TileExperts
from mllm_compile.runtime.ops.expert_tiles.kernel import BLOCK, ExpertTilesKernel
from mllm_compile.runtime.program.spec import Program
from mllm_compile.runtime.program.steps import PieceStep
from tests.passes.support.every_graph import (
    EXPERT_FFN,
    decoder_of_experts,
    decoder_of_experts_in_bfloat16,
    decoder_of_experts_with_biases,
)
from tests.passes.support.graph_builder import run
from tests.passes.support.stand_ins import ALL, FOR_GPUS, stand_in_ops, streamed_ops_on_cpu

HIDDEN = 256


@pytest.fixture(scope="module", autouse=True)
def kernels_on_cpu():
    with streamed_ops_on_cpu(), stand_in_ops(ALL):
        yield


def tiled(make) -> tuple[fx.GraphModule, int]:
    """The graph with no other kernels than these and what they are on."""
    gm, matches = make(), 0
    for graph_pass in FOR_GPUS:
        if not graph_pass.needs or graph_pass.name in ("group_experts", TileExperts.name):
            result = graph_pass()(gm)
            gm, matches = result.gm, result.matches if graph_pass is TileExperts else matches
    gm.recompile()
    return gm, matches


def ops_in(piece) -> list[str]:
    names = ("order_experts", "grouped_linear", "gated_expert_tiles", "expert_tiles")
    return [name for node in piece.graph.nodes for name in names if is_op(node, name)]


def test_pieces_for_many_tokens_are_tiled_and_their_variants_are_not():
    gm, matches = tiled(decoder_of_experts_in_bfloat16)
    assert matches > 0
    for name, variants in gm.meta[VARIANTS].items():
        piece = gm.get_submodule(name)
        if "order_experts" not in ops_in(piece):
            continue
        assert ops_in(piece) == ["order_experts", "gated_expert_tiles", "expert_tiles"]
        (order,) = [node for node in piece.graph.nodes if is_op(node, "order_experts")]
        assert order.args[3:] == (BLOCK, 0)
        assert not any("expert_tiles" in ops_in(gm.get_submodule(variant)) for variant in variants.values())


def test_a_tiled_piece_computes_what_was_traced():
    gm, _ = tiled(decoder_of_experts_in_bfloat16)
    torch.testing.assert_close(run(gm, 7), run(decoder_of_experts_in_bfloat16(), 7))


def test_a_program_has_the_kernels_of_its_tiled_pieces():
    gm, _ = tiled(decoder_of_experts_in_bfloat16)
    steps = tuple(PieceStep(name, (), ()) for name in gm.meta[VARIANTS])
    assert kernels_of(gm, Program(steps, (), (), "logits"))["expert_tiles"] == (
        ExpertTilesKernel(2 * EXPERT_FFN, HIDDEN, is_gated=True),
        ExpertTilesKernel(HIDDEN, EXPERT_FFN, is_gated=False),
    )


@pytest.mark.parametrize("make", [decoder_of_experts, decoder_of_experts_with_biases], ids=["float32", "biases"])
def test_linears_that_no_kernel_takes_stay(make):
    assert tiled(make)[1] == 0
