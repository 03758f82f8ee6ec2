"""passes/fuse_add_norm.py: the norm ahead of a linear of deterministic steps is one op, with the sum that it is of.

The kernel needs Triton; here the ops are stand-ins in plain torch.
"""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from mllm_compile.passes.base import ANY_ROWS
from mllm_compile.passes.fuse_add_norm import FuseAddNorm
from mllm_compile.passes.match.nodes import LINEAR
from mllm_compile.passes.sum_in_one_order import SumInOneOrder
from tests.passes.support.piece_block import FFN, HIDDEN, Block, decoder_piece, fused_ops, graph_of_one_piece
from tests.passes.support.stand_ins import NORMS, stand_in_ops, streamed_ops_on_cpu


@pytest.fixture(scope="module", autouse=True)
def stand_ins():
    with streamed_ops_on_cpu(), stand_in_ops(NORMS):
        yield


def in_one_order(piece: fx.GraphModule) -> fx.GraphModule:
    gm = graph_of_one_piece(piece)
    gm.meta[ANY_ROWS] = True
    assert SumInOneOrder()(gm).matches
    return gm


@pytest.mark.parametrize("form", ["rounded first", "rounded last", "plus one"])
def test_sums_and_norms_ahead_of_linears_are_one_op_each(form):
    piece, inputs = decoder_piece(4, norm=form)
    before = piece(*inputs)
    gm = in_one_order(piece)
    assert FuseAddNorm()(gm).matches == 2
    gm.piece_a.graph.lint()
    assert fused_ops(gm.piece_a).count("add_rms_norm") == 2
    assert not gm.piece_a.graph.find_nodes(op="call_function", target=torch.rsqrt)
    for ours, theirs in zip(gm.piece_a(*inputs), before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
    assert FuseAddNorm()(gm).matches == 0, "nothing is left"


@pytest.mark.parametrize("source", ["no sum", "a sum with a number", "a sum that is broadcast"])
def test_of_a_norm_of_no_sum_of_two_values_the_norm_alone_is_an_op(source):
    block = Block()
    x = block.input("x", 1, 4, HIDDEN)
    if source != "no sum":
        x = block.call(operator.add, x, 1.0 if "number" in source else block.input("row", HIDDEN))
    hidden = block.norm(x, block.input("norm", HIDDEN), "rounded first")
    gm = in_one_order(block.module(block.call(LINEAR, hidden, block.input("weight", FFN, HIDDEN), None)))
    before = gm.piece_a(*block.inputs)
    assert FuseAddNorm()(gm).matches == 1
    assert fused_ops(gm.piece_a) == ["rms_norm", "linear_in_one_order"]
    torch.testing.assert_close(gm.piece_a(*block.inputs), before, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("why", ["no linear reads it", "its row is too long", "linears are the library's"])
def test_other_norms_stay(why):
    block = Block()
    columns = 32768 if "long" in why else HIDDEN
    hidden = block.norm(block.input("x", 1, 4, columns), block.input("norm", columns), "rounded first")
    outputs = [block.call(LINEAR, block.input("other", 1, 4, HIDDEN), block.input("weight", 64, HIDDEN), None)]
    if not why.startswith("no"):
        outputs.append(block.call(LINEAR, hidden, block.input("further", 64, columns), None))
    gm = graph_of_one_piece(block.module(hidden, *outputs))
    if "library" not in why:
        assert SumInOneOrder()(gm).matches == len(outputs)
    assert FuseAddNorm()(gm).matches == 0
