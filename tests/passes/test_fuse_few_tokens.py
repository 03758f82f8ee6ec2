"""passes/fuse_few_tokens.py: which linears are fused, which norms go, and that the variant computes what the piece
does.

The kernels need CUDA and Triton; here their ops are stand-ins in plain torch.
"""

from __future__ import annotations

import operator

import pytest
import torch
from torch.nn.functional import linear

from mllm_compile.passes.base import VARIANTS
from mllm_compile.passes.fuse_few_tokens import FEW, FuseFewTokens, few_token_variant
from mllm_compile.passes.match.nodes import LINEAR
from mllm_compile.runtime.ops.few_tokens_shapes import MAX_FEW_TOKENS
from tests.passes.support.piece_block import (
    FFN,
    HIDDEN,
    NORM_FORMS,
    Block,
    decoder_piece,
    fused_ops,
    graph_of_one_piece,
)
from tests.passes.support.stand_ins import FEW_TOKENS, stand_in_ops


@pytest.fixture(scope="module", autouse=True)
def ops_on_cpu():
    with stand_in_ops(FEW_TOKENS):
        yield


def off_by(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()


@pytest.mark.parametrize("norm", NORM_FORMS)
def test_a_decoder_piece_becomes_four_kernels_without_a_norm(norm):
    piece, _ = decoder_piece(4, norm=norm)
    variant = few_token_variant(piece, FEW)
    assert variant is not None
    variant.graph.lint()
    assert fused_ops(variant) == ["few_linear_residual_norm", "few_linear"] * 2
    assert [node.args[4] for node in variant.graph.nodes if "few_linear.default" in str(node.target)] == [True, False]
    assert all(node.target is operator.getitem or "mllm" in str(node.target) for node in calls(variant))


@pytest.mark.parametrize("norm", NORM_FORMS)
def test_the_variant_computes_what_the_piece_does_and_the_piece_stays(norm):
    piece, inputs = decoder_piece(4, norm=norm)
    before, text = piece(*inputs), str(piece.graph)
    variant = few_token_variant(piece, FEW)
    assert variant is not None
    assert str(piece.graph) == text
    for ours, theirs in zip(variant(*inputs), before, strict=True):
        assert off_by(ours, theirs) < 8e-3


def test_in_float16_norms_stay():
    piece, inputs = decoder_piece(4, torch.float16)
    variant = few_token_variant(piece, FEW)
    assert variant is not None
    assert fused_ops(variant) == ["few_linear_residual", "few_linear"] * 2
    for ours, theirs in zip(variant(*inputs), piece(*inputs), strict=True):
        assert off_by(ours, theirs) < 2e-3


def test_a_norm_that_something_else_reads_too_stays():
    block = Block()
    x, residual = block.input("x", 1, 4, FFN), block.input("residual", 1, 4, HIDDEN)
    out = block.call(operator.add, residual, block.call(LINEAR, x, block.input("w", HIDDEN, FFN), None))
    hidden = block.norm(out, block.input("norm", HIDDEN))
    product = block.call(LINEAR, hidden, block.input("w2", HIDDEN, HIDDEN), None)
    piece = block.module(hidden, product)
    variant = few_token_variant(piece, FEW)
    assert variant is not None
    assert fused_ops(variant) == ["few_linear_residual", "few_linear"]
    for ours, theirs in zip(variant(*block.inputs), piece(*block.inputs), strict=True):
        assert off_by(ours, theirs) < 8e-3


def test_a_norm_with_two_readers_of_ours_goes():
    block = Block()
    x, residual = block.input("x", 1, 4, FFN), block.input("residual", 1, 4, HIDDEN)
    out = block.call(operator.add, block.call(LINEAR, x, block.input("w", HIDDEN, FFN), None), residual)
    hidden = block.norm(out, block.input("norm", HIDDEN))
    readers = [block.call(LINEAR, hidden, block.input(name, HIDDEN, HIDDEN), None) for name in ("q", "k")]
    variant = few_token_variant(block.module(*readers), FEW)
    assert variant is not None
    assert fused_ops(variant) == ["few_linear_residual_norm", "few_linear", "few_linear"]


def test_a_linear_with_a_bias_or_odd_sizes_is_left_alone():
    block = Block()
    x, residual = block.input("x", 1, 1, HIDDEN), block.input("residual", 1, 1, HIDDEN)
    biased = block.call(LINEAR, x, block.input("w", HIDDEN, HIDDEN), block.input("b", HIDDEN))
    odd = block.call(LINEAR, x, block.input("w_odd", HIDDEN + 4, HIDDEN), None)
    assert few_token_variant(block.module(block.call(operator.add, residual, biased), odd), FEW) is None


@pytest.mark.parametrize("kind", ["scaled", "float32"])
def test_a_sum_that_is_no_plain_residual_keeps_its_linear(kind):
    block = Block()
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    x, residual = block.input("x", 1, 4, FFN), block.input("residual", 1, 4, HIDDEN, dtype=dtype)
    product = block.call(LINEAR, x, block.input("w", HIDDEN, FFN), None)
    scale = {"alpha": 0.25} if kind == "scaled" else {}
    piece = block.module(block.call(torch.add, residual, product, **scale))
    variant = few_token_variant(piece, FEW)
    assert variant is not None
    assert fused_ops(variant) == ["few_linear"]
    assert off_by(variant(*block.inputs)[0], piece(*block.inputs)[0]) < 8e-3


def test_operands_may_be_named():
    block = Block()
    x, weight = block.input("x", 1, 4, HIDDEN), block.input("w", HIDDEN, HIDDEN)
    product = block.graph.call_function(LINEAR, (x,), {"weight": weight})
    product.meta["val"] = linear(x.meta["val"], weight.meta["val"])
    variant = few_token_variant(block.module(product), FEW)
    assert variant is not None
    assert fused_ops(variant) == ["few_linear"]


def test_the_pass_adds_one_variant_a_distinct_piece():
    gm = graph_of_one_piece(decoder_piece(4)[0])
    assert FuseFewTokens()(gm).matches == 1
    assert gm.meta[VARIANTS] == {"piece_a": {MAX_FEW_TOKENS: "piece_a_few_tokens"}}


def calls(gm):
    return [node for node in gm.graph.nodes if node.op in ("call_function", "call_method")]


def test_a_variant_for_fewer_tokens_is_no_obstacle():
    gm = graph_of_one_piece(decoder_piece(4)[0])
    gm.meta[VARIANTS] = {"piece_a": {8: "piece_a_streamed"}}
    assert FuseFewTokens()(gm).matches == 1
    assert gm.meta[VARIANTS] == {"piece_a": {8: "piece_a_streamed", MAX_FEW_TOKENS: "piece_a_few_tokens"}}
