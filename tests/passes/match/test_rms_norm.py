"""passes/match/rms_norm.py: models' forms of an RMS norm, and similar graphs."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from mllm_compile.passes.match.rms_norm import RMSNorm, match_rms_norm
from tests.passes.support.piece_block import EPS, HIDDEN, NORM_FORMS, Block


def normed(block: Block, of: fx.Node, form: str = "plus one", weight_dtype=torch.bfloat16) -> fx.Node:
    weight = block.input("norm", HIDDEN, dtype=weight_dtype)
    return block.norm(of, weight, form)


def matched(block: Block, node: fx.Node) -> RMSNorm | None:
    block.module(node)
    return match_rms_norm(node)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", NORM_FORMS)
def test_every_form_says_what_is_normed_and_by_which_weight(form, dtype):
    block = Block()
    x = block.input("x", 1, 4, HIDDEN, dtype=dtype)
    norm = matched(block, normed(block, x, form, dtype))
    assert norm is not None
    assert (norm.x, norm.weight.name, norm.eps, norm.plus_one) == (x, "norm", EPS, form == "plus one")


def test_changes_to_the_type_that_a_value_has_are_looked_through():
    block = Block()
    x = block.input("x", 1, 4, HIDDEN)
    norm = matched(block, normed(block, block.call("to", block.call("to", x, torch.bfloat16), torch.bfloat16)))
    assert norm is not None
    assert norm.x is x


def test_what_is_added_to_the_weight_must_be_one():
    block = Block()
    node = normed(block, block.input("x", 1, 4, HIDDEN))
    (offset,) = [one for one in block.graph.nodes if one.target is operator.add and one.args[0] == 1.0]
    offset.args = (2.0, offset.args[1])
    assert matched(block, node) is None


@pytest.mark.parametrize("form", ["rounded last", "plus one"])
def test_a_weight_of_another_type_is_not_what_kernels_read(form):
    block = Block()
    assert matched(block, normed(block, block.input("x", 1, 4, HIDDEN), form, torch.float32)) is None


def test_a_result_of_another_type_does_not_match():
    block = Block()
    node = normed(block, block.input("x", 1, 4, HIDDEN))
    assert matched(block, block.call("to", node.args[0], torch.float16)) is None


def test_a_computed_weight_does_not_match():
    block = Block()
    x, weight = block.input("x", 1, 4, HIDDEN), block.input("norm", HIDDEN)
    assert matched(block, block.norm(x, block.call(torch.relu, weight), "rounded last")) is None
