"""passes/fuse_gated_linear.py: gate_up and the activation become one op in pieces that fewer tokens do not come to.

The kernels need a Hopper GPU; here their ops are stand-ins in plain torch.
"""

from __future__ import annotations

import pytest
import torch
from torch import fx

from mllm_compile.kernels.cuda import kernels_of
from mllm_compile.passes.fuse_gated_linear import FuseGatedLinear
from mllm_compile.passes.match import nodes
from mllm_compile.passes.match.nodes import LINEAR
from mllm_compile.passes.stream_linears import StreamLinears
from mllm_compile.runtime.ops.gated_linear.kernel import gated_kernels
from mllm_compile.runtime.program.spec import Program
from mllm_compile.runtime.program.steps import PieceStep
from tests.passes.support.piece_block import FFN, HIDDEN, Block, decoder_piece, fused_ops, graph_of_one_piece
from tests.passes.support.stand_ins import LORA, stand_in_ops, streamed_ops_on_cpu


@pytest.fixture(scope="module", autouse=True)
def stand_ins():
    with streamed_ops_on_cpu(), stand_in_ops(LORA), pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "KERNEL_DEVICE_TYPE", "cpu")
        yield


def rewritten(piece: fx.GraphModule, is_streamed: bool = True) -> tuple[int, fx.GraphModule]:
    gm = graph_of_one_piece(piece)
    if is_streamed:
        assert StreamLinears()(gm).matches == 1
    matches = FuseGatedLinear()(gm).matches
    gm.piece_a.graph.lint()
    return matches, gm


def test_the_piece_for_many_tokens_is_rewritten_and_computes_the_same():
    piece, inputs = decoder_piece(4)
    before = piece(*inputs)
    matches, gm = rewritten(piece)
    assert matches == 1
    assert fused_ops(gm.piece_a) == ["gated_linear"]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gm.piece_a(*inputs), before, strict=True))
    assert "gated_linear" not in fused_ops(gm.piece_a_streamed)
    program = Program((PieceStep("piece_a", (), ()),), (), (), "logits")
    assert kernels_of(gm, program)["gated_linear"] == gated_kernels(2 * FFN, HIDDEN)


@pytest.mark.parametrize(("rank", "is_taken"), [(16, True), (32, True), (8, False), (64, False)])
def test_adapters_of_gates_and_ups_go_with_the_product_where_the_kernel_takes_their_rank(rank, is_taken):
    piece, inputs = decoder_piece(4, rank=rank)
    before = piece(*inputs)
    matches, gm = rewritten(piece)
    assert matches == int(is_taken)
    assert ("gated_linear_lora" in fused_ops(gm.piece_a)) is is_taken
    assert fused_ops(gm.piece_a).count("lora_shrink") == int(is_taken)
    for ours, theirs in zip(gm.piece_a(*inputs), before, strict=True):
        assert (ours - theirs).float().norm() <= 4e-3 * theirs.float().norm()
    program = Program((PieceStep("piece_a", (), ()),), (), (), "logits")
    expected = gated_kernels(2 * FFN, HIDDEN, rank) if is_taken else ()
    assert kernels_of(gm, program).get("gated_linear", ()) == expected


def test_a_piece_without_a_variant_for_fewer_tokens_stays():
    """Tiles are of 256 tokens: a decode would wait for as many."""
    assert rewritten(decoder_piece(4)[0], is_streamed=False)[0] == 0


def gated(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, reads_product: bool = False) -> fx.GraphModule:
    block = Block()
    x = block.input("x", 1, 4, columns, dtype=dtype)
    product = block.call(LINEAR, x, block.input("gate_up", rows, columns, dtype=dtype), None)
    outputs = [block.silu_mul(product)]
    return block.module(*outputs, *([block.call(torch.relu, product)] if reads_product else []))


def test_a_product_that_is_read_elsewhere_stays():
    assert rewritten(gated(512, 256, reads_product=True))[0] == 0


def test_another_type_and_a_bias_stay(monkeypatch):
    """Neither is streamed: said to be here, so that this pass decides."""
    monkeypatch.setattr(StreamLinears, "__call__", stream_all)
    assert rewritten(gated(512, 256, torch.float16))[0] == 0
    assert rewritten(gated(480, 256))[0] == 0
    assert rewritten(gated(512, 256))[0] == 1
    block = Block()
    biased = block.call(LINEAR, block.input("x", 1, 4, 256), block.input("w", 512, 256), block.input("b", 512))
    assert rewritten(block.module(block.silu_mul(biased)))[0] == 0


def stream_all(self, gm: fx.GraphModule):
    gm.meta["variants"] = {"piece_a": {256: "piece_a_streamed"}}
    return type("Result", (), {"matches": 1})
