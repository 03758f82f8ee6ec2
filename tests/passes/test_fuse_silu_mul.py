"""passes/fuse_silu_mul.py: the activation becomes one op in the piece itself; what only looks like it stays."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.nn.functional import gelu, silu

from mllm_compile.passes.fuse_silu_mul import FuseSiluMul
from tests.passes.support.piece_block import FFN, Block, decoder_piece, fused_ops, graph_of_one_piece
from tests.passes.support.stand_ins import SILU_MUL, stand_in_ops


@pytest.fixture(scope="module", autouse=True)
def stand_in():
    with stand_in_ops(SILU_MUL):
        yield


def rewritten(piece):
    gm = graph_of_one_piece(piece)
    matches = FuseSiluMul()(gm).matches
    gm.piece_a.graph.lint()
    return matches, gm.piece_a


def test_the_piece_itself_is_rewritten_and_computes_the_same():
    piece, inputs = decoder_piece(3)
    before = piece(*inputs)
    matches, after = rewritten(piece)
    assert matches == 1
    assert fused_ops(after) == ["silu_mul"]
    assert not any(node.target is silu for node in after.graph.nodes)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(after(*inputs), before, strict=True))


def test_the_gate_may_be_on_either_side():
    block = Block()
    halves = block.call(torch.split, block.input("x", 3, 2 * FFN), [FFN, FFN], dim=-1)
    gate, up = block.call(operator.getitem, halves, 0), block.call(operator.getitem, halves, 1)
    piece = block.module(block.call(operator.mul, up, block.call(silu, gate)))
    before = piece(*block.inputs)[0]
    matches, after = rewritten(piece)
    assert matches == 1
    assert torch.equal(after(*block.inputs)[0], before)


def unlike(block: Block, width: int, sizes: list[int], gate_index: int, dim: int, activation=silu):
    halves = block.call(torch.split, block.input("x", 2 * FFN, width), sizes, dim=dim)
    gate, up = block.call(operator.getitem, halves, gate_index), block.call(operator.getitem, halves, 1 - gate_index)
    return block.module(block.call(operator.mul, block.call(activation, gate), up))


@pytest.mark.parametrize(
    "case",
    [
        (2 * FFN, [FFN, FFN], 1, -1),  # up first
        (2 * FFN, [FFN, FFN], 0, 0),  # halves of the tokens
        (2 * FFN, [FFN, FFN], 0, -1, gelu),
        (2 * 200, [200, 200], 0, -1),  # no multiple of a block
    ],
)
def test_what_only_looks_like_it_stays(case):
    matches, after = rewritten(unlike(Block(), *case))
    assert matches == 0
    assert fused_ops(after) == []
