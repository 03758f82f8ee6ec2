"""unrepeat_keys: copies of queries and keys for each value head go, and numbers stay."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from mllm_compile.passes.match.nodes import is_op
from mllm_compile.passes.unrepeat_keys import UnrepeatKeys
from tests.passes.support.graph_builder import HEAD_DIM, HEADS, HIDDEN, GraphBuilder, run

KEY_HEADS = HEADS // 2


def graph(count: int = 2, dim: int = 2, key_dim: int | None = None) -> fx.GraphModule:
    builder = GraphBuilder()
    x = builder.embed()
    heads = builder.method("view", x, builder.size_inputs["T"], HEADS, HEAD_DIM)
    gates = builder.call(torch.sigmoid, builder.linear(x, "gates", HEADS))
    operands = []
    for name, along in (("q", dim), ("k", dim if key_dim is None else key_dim)):
        small = builder.linear(x, name, KEY_HEADS * HEAD_DIM)
        small = builder.call(torch.unsqueeze, builder.call(torch.reshape, small, (-1, KEY_HEADS, HEAD_DIM)), 0)
        if along == dim:
            small = builder.method("repeat_interleave", small, count, dim=along)
        else:
            small = builder.call(torch.cat, (small, small), along)
        operands.append(builder.call(operator.getitem, small, 0))
    op = torch.ops.mllm.gated_delta.default
    out = builder.call(op, *operands, heads, gates, gates, None, None, None, None, True, 0.0, "", "")
    return builder.canonical(builder.head(builder.call(torch.reshape, out, (-1, HIDDEN))))


def test_a_rule_reads_a_key_head_for_all_its_value_heads():
    gm = graph()
    before = run(gm)
    assert UnrepeatKeys()(gm).matches == 1 and UnrepeatKeys()(gm).matches == 0
    gm.recompile()
    rule = next(node for node in gm.graph.nodes if is_op(node, "gated_delta"))
    assert [operand.meta["val"].shape[1] for operand in rule.args[:3]] == [KEY_HEADS, KEY_HEADS, HEADS]
    assert torch.equal(run(gm), before)


def test_keys_that_are_copied_otherwise_stay():
    gm = graph(key_dim=-2)
    before = run(gm)
    assert UnrepeatKeys()(gm).matches == 0
    assert torch.equal(run(gm), before)


@pytest.mark.parametrize("dim", [3])
def test_repeated_columns_are_no_heads(dim):
    builder = GraphBuilder()
    x = builder.embed()
    halves = builder.method("view", x, builder.size_inputs["T"], HEADS, HEAD_DIM)
    small = builder.call(torch.unsqueeze, builder.call(operator.getitem, halves, (..., slice(0, HEAD_DIM // 2))), 0)
    twice = builder.method("repeat_interleave", small, 2, dim=dim)
    key = builder.call(operator.getitem, twice, 0)
    gates = builder.call(torch.sigmoid, builder.linear(x, "gates", HEADS))
    op = torch.ops.mllm.gated_delta.default
    out = builder.call(op, key, key, halves, gates, gates, None, None, None, None, True, 0.0, "", "")
    gm = builder.canonical(builder.head(builder.call(torch.reshape, out, (-1, HIDDEN))))
    assert UnrepeatKeys()(gm).matches == 0
