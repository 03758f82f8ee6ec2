"""passes/choose_experts.py: a router's choice becomes one op with what is around it; other choices stay."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.nn import functional

from mllm_compile.passes.choose_experts import ChooseExperts
from mllm_compile.runtime.ops.experts.shapes import NO_SOFTMAX, SOFTMAX_OF_ALL, SOFTMAX_OF_CHOSEN
from tests.passes.support.piece_block import Block, graph_of_one_piece
from tests.passes.support.stand_ins import EXPERTS, stand_in_ops

NUM_EXPERTS, CHOSEN = 8, 3


@pytest.fixture(scope="module", autouse=True)
def stand_in():
    with stand_in_ops(EXPERTS):
        yield


def parts(block: Block, chosen):
    return block.call(operator.getitem, chosen, 0), block.call(operator.getitem, chosen, 1)


def logits(block: Block, dtype: torch.dtype = torch.float32):
    return block.input("logits", 5, NUM_EXPERTS, dtype=dtype)


def softmax_first(block: Block, renormalises: bool):
    scores = block.call(functional.softmax, logits(block, torch.bfloat16), dtype=torch.float32, dim=-1)
    values, ids = parts(block, block.call(torch.topk, scores, CHOSEN, dim=-1))
    if renormalises:
        values = block.call(operator.truediv, values, block.call("sum", values, dim=-1, keepdim=True))
    return values, ids


def softmax_last(block: Block):
    values, ids = parts(block, block.call("topk", logits(block), k=CHOSEN, dim=-1))
    return block.call(functional.softmax, values, dim=1, dtype=torch.float32), ids


def groups_left_out(block: Block):
    """As DeepSeek's: sigmoids, with whole groups set to -inf; weights are gathered from the others."""
    scores = block.call(torch.sigmoid, logits(block))
    mask = block.input("mask", 5, NUM_EXPERTS, dtype=torch.float32)
    shown = block.call("masked_fill", scores, block.call(operator.lt, mask, 0.0), float("-inf"))
    _, ids = parts(block, block.call(torch.topk, shown, CHOSEN, dim=-1, sorted=False))
    return block.call("gather", scores, 1, ids), ids


CHOICES = {
    "softmax": (lambda block: softmax_first(block, False), SOFTMAX_OF_ALL, False),
    "softmax and renormalisation": (lambda block: softmax_first(block, True), SOFTMAX_OF_ALL, True),
    "softmax of the chosen": (softmax_last, SOFTMAX_OF_CHOSEN, False),
    "groups": (groups_left_out, NO_SOFTMAX, False),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_becomes_one_op_that_computes_the_same(name):
    make, softmax, renormalises = CHOICES[name]
    block = Block()
    piece = block.module(*make(block))
    before = piece(*block.inputs)
    gm = graph_of_one_piece(piece)
    assert ChooseExperts()(gm).matches == 1
    (node,) = (node for node in gm.piece_a.graph.nodes if node.target is torch.ops.mllm.choose_experts.default)
    assert node.args[1:] == (CHOSEN, softmax, renormalises)
    for ours, theirs in zip(gm.piece_a(*block.inputs), before, strict=True):
        # Of DeepSeek's choice no order is asked for.
        torch.testing.assert_close(ours.sort(-1).values, theirs.sort(-1).values)


def scores_have_a_second_reader(block: Block):
    scores = block.call(functional.softmax, logits(block), dim=-1)
    values, ids = parts(block, block.call(torch.topk, scores, CHOSEN, dim=-1))
    return values, ids, block.call("sum", scores, dim=-1)


def values_have_a_second_reader(block: Block):
    values, ids = softmax_first(block, False)
    total = block.call("sum", values, dim=-1, keepdim=True)
    return block.call(operator.truediv, values, total), ids, block.call(torch.neg, values)


def division_is_in_another_dtype(block: Block):
    values, ids = parts(block, block.call(torch.topk, logits(block, torch.bfloat16), CHOSEN, dim=-1))
    total = block.call("sum", values, dim=-1, keepdim=True, dtype=torch.float32)
    return block.call(operator.truediv, values, total), ids


def total_is_rounded(block: Block):
    values, ids = parts(block, block.call(torch.topk, logits(block), CHOSEN, dim=-1))
    total = block.call("sum", values, dim=-1, keepdim=True, dtype=torch.bfloat16)
    return block.call(operator.truediv, values, total), ids


@pytest.mark.parametrize(
    ("make", "softmax"),
    [
        (scores_have_a_second_reader, NO_SOFTMAX),
        (values_have_a_second_reader, SOFTMAX_OF_ALL),
        (division_is_in_another_dtype, NO_SOFTMAX),
        (total_is_rounded, NO_SOFTMAX),
    ],
)
def test_what_others_read_as_well_or_is_in_another_dtype_stays_beside_the_choice(make, softmax):
    block = Block()
    piece = block.module(*make(block))
    before = piece(*block.inputs)
    gm = graph_of_one_piece(piece)
    assert ChooseExperts()(gm).matches == 1
    (node,) = (node for node in gm.piece_a.graph.nodes if node.target is torch.ops.mllm.choose_experts.default)
    assert node.args[2:] == (softmax, False)
    for ours, theirs in zip(gm.piece_a(*block.inputs), before, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "said",
    [{"k": CHOSEN, "largest": False}, {"k": CHOSEN, "dim": 0}, {"k": 33}],
    ids=["the smallest", "of each column", "too many"],
)
def test_other_choices_stay(said):
    block = Block()
    scores = block.input("scores", 5, 40, dtype=torch.float32)
    piece = block.module(*parts(block, block.call(torch.topk, scores, **said)))
    assert ChooseExperts()(graph_of_one_piece(piece)).matches == 0
