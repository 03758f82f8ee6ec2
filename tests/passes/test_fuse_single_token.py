"""passes/fuse_single_token.py: which linears are fused, and that the fused piece computes what the piece did.

The kernels need CUDA and Triton; here their ops are stand-ins in plain torch, with the same roundings.
"""

from __future__ import annotations

import operator

import pytest
import torch

from mllm_compile.passes.base import VARIANTS
from mllm_compile.passes.fuse_single_token import FuseSingleToken, single_token_variant
from mllm_compile.passes.match.nodes import LINEAR
from tests.passes.support.piece_block import HIDDEN, Block, decoder_piece, fused_ops, graph_of_one_piece
from tests.passes.support.stand_ins import SINGLE_TOKEN, stand_in_ops


@pytest.fixture(scope="module", autouse=True)
def stand_ins():
    with stand_in_ops(SINGLE_TOKEN):
        yield


def test_a_decoder_piece_becomes_four_kernels():
    piece, _ = decoder_piece()
    variant = single_token_variant(piece)
    assert variant is not None
    assert fused_ops(variant) == ["linear_residual", "norm_gated_linear", "linear_residual", "norm_linear"]
    assert not any(node.op == "call_function" and node.target is LINEAR for node in variant.graph.nodes)


@pytest.mark.parametrize(("norm", "bound"), [("rounded first", 0.0), ("rounded last", 8e-3), ("plus one", 0.0)])
def test_the_variant_computes_what_the_piece_does_and_the_piece_stays(norm, bound):
    """Bit for bit but for a norm that the kernel rounds once more than the model."""
    piece, inputs = decoder_piece(norm=norm)
    before, text = piece(*inputs), str(piece.graph)
    variant = single_token_variant(piece)
    assert variant is not None
    assert str(piece.graph) == text
    assert fused_ops(variant) == ["linear_residual", "norm_gated_linear", "linear_residual", "norm_linear"]
    for ours, theirs in zip(variant(*inputs), before, strict=True):
        assert (ours.float() - theirs.float()).norm() <= bound * theirs.float().norm()


def test_a_linear_with_a_bias_another_activation_or_odd_sizes_is_left_alone():
    block = Block()
    x, residual = block.input("x", 1, 1, HIDDEN), block.input("residual", 1, 1, HIDDEN)
    biased = block.call(LINEAR, x, block.input("w", HIDDEN, HIDDEN), block.input("b", HIDDEN))
    odd = block.call(LINEAR, x, block.input("w_odd", HIDDEN + 1, HIDDEN), None)
    out = block.call(operator.add, residual, biased)
    assert single_token_variant(block.module(out, odd)) is None


def test_a_product_that_others_read_keeps_its_linear():
    block = Block()
    x, residual = block.input("x", 1, 1, HIDDEN), block.input("residual", 1, 1, HIDDEN)
    product = block.call(LINEAR, x, block.input("w", HIDDEN, HIDDEN), None)
    assert single_token_variant(block.module(block.call(operator.add, residual, product), product)) is None


def test_a_norm_that_others_read_stays_and_its_linear_is_fused():
    block = Block()
    hidden = block.norm(block.input("x", 1, 1, HIDDEN), block.input("norm", HIDDEN))
    product = block.call(LINEAR, hidden, block.input("w", HIDDEN, HIDDEN), None)
    piece = block.module(hidden, product)
    variant = single_token_variant(piece)
    assert variant is not None
    assert fused_ops(variant) == ["norm_linear"]
    assert all(torch.equal(a, b) for a, b in zip(variant(*block.inputs), piece(*block.inputs), strict=True))


def test_the_pass_adds_one_variant_a_distinct_piece():
    piece, _ = decoder_piece()
    gm = graph_of_one_piece(piece)
    assert FuseSingleToken()(gm).matches == 1
    assert gm.meta[VARIANTS] == {"piece_a": {1: "piece_a_one_token"}}
