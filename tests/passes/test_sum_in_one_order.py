"""passes/sum_in_one_order.py: linears of deterministic steps become ops with kernels for few rows, all of them or none.

The kernels need a Hopper GPU; here their ops are stand-ins in plain torch.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mllm_compile.kernels.cuda import kernels_of
from mllm_compile.passes.base import ANY_ROWS, PassTarget
from mllm_compile.passes.fuse_gated_linear import FuseGatedLinear
from mllm_compile.passes.match import nodes
from mllm_compile.passes.match.nodes import LINEAR
from mllm_compile.passes.sum_in_one_order import SumInOneOrder
from mllm_compile.runtime.ops.stream_linear.linear import LinearKind
from mllm_compile.runtime.program.spec import Program
from mllm_compile.runtime.program.steps import PieceStep
from tests.passes.support.piece_block import FFN, HIDDEN, Block, decoder_piece, fused_ops, graph_of_one_piece
from tests.passes.support.stand_ins import streamed_ops_on_cpu

TARGET = PassTarget("cuda", True, True, True, "bfloat16", "bfloat16", deterministic=True, any_rows=True)


@pytest.fixture(scope="module", autouse=True)
def stand_ins():
    with streamed_ops_on_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "KERNEL_DEVICE_TYPE", "cpu")
        yield


def test_all_linears_of_a_piece_have_kernels_of_few_rows_and_compute_the_same():
    piece, inputs = decoder_piece(4)
    before = piece(*inputs)
    gm = graph_of_one_piece(piece)
    gm.meta[ANY_ROWS] = True
    assert FuseGatedLinear()(gm).matches == 1
    count = len(gm.piece_a.graph.find_nodes(op="call_function", target=LINEAR))
    assert SumInOneOrder()(gm).matches == count + 1 > 2
    gm.piece_a.graph.lint()
    told = [node for node in gm.piece_a.graph.nodes if len(node.args) == 4 and "one_order" in str(node.target)]
    assert [str(node.args[3]) for node in told] == ["gate_up"], "the linear behind attention alone"
    assert fused_ops(gm.piece_a).count("gated_linear_in_one_order") == 1
    assert fused_ops(gm.piece_a).count("linear_in_one_order") == count
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gm.piece_a(*inputs), before, strict=True))
    kernels = kernels_of(gm, Program((PieceStep("piece_a", (), ()),), (), (), "logits"))
    ahead = {one.kind: one.ahead_bytes for one in kernels["one_order"] if one.ahead_bytes}
    assert ahead == {LinearKind(HIDDEN, HIDDEN): 2 * 2 * FFN * HIDDEN}
    assert LinearKind(2 * FFN, HIDDEN, gated=True) in {one.kind for one in kernels["one_order"]}
    assert {(one.tokens, one.split) for one in kernels["one_order"]} == {(8, 1), (16, 1), (32, 1), (64, 1)}
    assert kernels["gated_linear"], "for more rows"
    assert SumInOneOrder()(gm).matches == 0, "nothing is left"


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_bias_is_added_ahead_of_rounding(has_bias):
    block = Block()
    x, weight = block.input("x", 1, 4, HIDDEN), block.input("weight", FFN, HIDDEN)
    piece = block.module(block.call(LINEAR, x, weight, block.input("bias", FFN) if has_bias else None))
    gm = graph_of_one_piece(piece)
    assert SumInOneOrder()(gm).matches == 1
    kernel, *_ = kernels_of(gm, Program((PieceStep("piece_a", (), ()),), (), (), "logits"))["one_order"]
    assert kernel.kind == LinearKind(FFN, HIDDEN, bias=has_bias)


@pytest.mark.parametrize("why", ["rows", "columns", "dtype", "a weight that the step makes"])
def test_where_one_linear_has_no_such_kernel_none_is_rewritten(why):
    block = Block()
    columns, dtype = (96, torch.bfloat16) if why == "columns" else (HIDDEN, torch.bfloat16)
    dtype = torch.float32 if why == "dtype" else dtype
    x, plain = block.input("x", 1, 4, columns, dtype=dtype), block.input("plain", 1, 4, HIDDEN)
    weight = block.input("weight", 100 if why == "rows" else FFN, columns, dtype=dtype)
    if why.startswith("a weight"):
        weight = block.call(torch.relu, weight)
    other = block.call(LINEAR, plain, block.input("other", FFN, HIDDEN), None)
    gm = graph_of_one_piece(block.module(block.call(LINEAR, x, weight, None), other))
    assert SumInOneOrder()(gm).matches == 0
    assert not kernels_of(gm, Program((PieceStep("piece_a", (), ()),), (), (), "logits")).get("one_order")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"any_rows": False}, "only deterministic steps"),
        ({"num_ranks": 2}, "sums over ranks"),
        ({"compiles_cuda": False}, "NVRTC"),
        ({}, None),
    ],
)
def test_it_is_for_steps_of_any_number_of_rows_of_one_rank(changes, reason):
    obstacle = SumInOneOrder.obstacle(replace(TARGET, **changes))
    assert obstacle is None if reason is None else reason in str(obstacle)
