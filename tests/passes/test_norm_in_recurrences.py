"""norm_in_recurrences: which gated norms it takes, that numbers stay as they are, and what it leaves alone."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from mllm_compile.passes.match.nodes import is_op
from mllm_compile.passes.norm_in_recurrences import NormInRecurrences
from tests.passes.support.graph_builder import HEAD_DIM, HEADS, HIDDEN, GraphBuilder, run, targets

ACTS = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid, "relu": torch.relu}


def graph(change: str = "", act: str = "silu") -> fx.GraphModule:
    """A gated delta rule with the norm behind it, as Qwen3.5 has it, but for `change`."""
    builder = GraphBuilder()
    x = builder.embed()
    heads = builder.method("view", x, builder.size_inputs["T"], HEADS, HEAD_DIM)
    gates = builder.call(torch.sigmoid, builder.linear(x, "gates", HEADS))
    z = builder.linear(x, "z", HIDDEN)
    op = torch.ops.mllm.gated_delta.default
    out = builder.call(op, heads, heads, heads, gates, gates, None, None, None, None, True, 0.0, "", "")
    if change == "a gate from behind":
        z = builder.linear(builder.call(torch.relu, x), "later_z", HIDDEN)
    if change == "a gate of the outputs":
        z = builder.method("flatten", out, 1)
    rows = builder.call(torch.reshape, builder.call(operator.getitem, out, None), (-1, HEAD_DIM))
    z = builder.call(torch.reshape, builder.call(torch.unsqueeze, z, 0), (-1, HEAD_DIM))
    wide = builder.method("float", rows)
    square = builder.call(torch.mean, builder.call(operator.pow, wide, 2), -1, True)
    scaled = builder.call(operator.mul, wide, builder.call(torch.rsqrt, builder.call(operator.add, square, 1e-5)))
    if change != "not rounded":
        scaled = builder.method("to", scaled, torch.float32)
    weight = builder.weight("norm", HEAD_DIM)
    normed = builder.call(operator.mul, weight, scaled)
    if change == "turned":
        normed = builder.call(operator.mul, scaled, builder.method("float", weight))
    gate = builder.call(ACTS[act], builder.method("float", z))
    result = builder.method("to", builder.call(operator.mul, normed, gate), torch.float32)
    if change == "another reader":
        result = builder.call(operator.add, result, rows)
    return builder.canonical(builder.head(builder.call(torch.reshape, result, (-1, HIDDEN))))


def scan_graph(change: str = "", groups: int = 1) -> fx.GraphModule:
    """Mamba-2's scan with the norm behind it, as Nemotron-H has it, but for `change`."""
    builder = GraphBuilder()
    x = builder.embed()
    tokens = builder.size_inputs["T"]
    heads = builder.method("view", x, tokens, HEADS, HEAD_DIM)
    numbers = builder.call(torch.unsqueeze, builder.linear(x, "numbers", 3), 1)
    z = builder.call(torch.unsqueeze, builder.linear(x, "z", HIDDEN), 0)
    rates = builder.weight("A", HEADS)
    given: tuple[Any, ...] = (heads, builder.linear(x, "dt", HEADS), rates, numbers, numbers, *[None] * 4)
    out = builder.call(torch.ops.mllm.ssd.default, *given, True, 0.0, None, False, 0.0, 1, "")
    flat = builder.call(torch.reshape, builder.call(operator.getitem, out, None), (1, tokens, -1))
    if change == "a gate of the outputs":
        z = flat
    act = torch.sigmoid if change == "another gate" else torch.nn.functional.silu
    pair = (builder.method("float", flat), builder.call(act, builder.method("float", z)))
    gated = builder.call(operator.mul, *(pair[::-1] if change == "turned" else pair))
    parts = builder.method("view", gated, 1, tokens, groups, HIDDEN // groups) if groups else gated
    square = builder.call(torch.mean, builder.call(operator.pow, parts, 2), -1, True)
    scaled = builder.call(operator.mul, parts, builder.call(torch.rsqrt, builder.call(operator.add, square, 1e-5)))
    scaled = builder.method("view", scaled, 1, tokens, HIDDEN)
    width = HEAD_DIM if change == "a weight a head" else HIDDEN
    if change == "a weight a head":
        scaled = builder.method("view", scaled, 1, tokens, HEADS, HEAD_DIM)
    normed = builder.call(operator.mul, builder.weight("norm", width), builder.method("float", scaled))
    result = builder.method("to", normed, torch.float32)
    if change == "another reader":
        result = builder.call(operator.add, result, gated)
    return builder.canonical(builder.head(builder.call(torch.reshape, result, (-1, HIDDEN))))


@pytest.mark.parametrize(("change", "groups"), [("", 0), ("", 1), ("", 2), ("turned", 2)])
def test_the_norm_behind_a_scan_becomes_its_own(change, groups):
    gm = scan_graph(change, groups)
    before = run(gm)
    assert NormInRecurrences()(gm).matches == 1 and NormInRecurrences()(gm).matches == 0
    gm.recompile()
    scan: Any = next(node for node in gm.graph.nodes if is_op(node, "ssd"))
    z, norm = scan.args[7:9]
    assert z.meta["val"].shape[1:] == (HEADS, HEAD_DIM) and norm.meta["weight_name"] == "norm"
    assert scan.args[13:15] == (1e-5, max(groups, 1))
    assert "rsqrt" not in targets(gm)
    torch.testing.assert_close(run(gm), before)


@pytest.mark.parametrize("change", ["another reader", "a gate of the outputs", "another gate", "a weight a head"])
def test_another_norm_of_a_scan_stays(change):
    gm = scan_graph(change, groups=2)
    before = run(gm)
    assert NormInRecurrences()(gm).matches == 0
    assert torch.equal(run(gm), before)


def rule_of(gm: fx.GraphModule) -> fx.Node:
    return next(node for node in gm.graph.nodes if is_op(node, "gated_delta"))


@pytest.mark.parametrize(
    ("change", "act"),
    [("", "silu"), ("", "sigmoid"), ("turned", "silu"), ("not rounded", "silu"), ("a gate from behind", "silu")],
)
def test_the_norm_behind_a_rule_becomes_its_own(change, act):
    gm = graph(change, act)
    before = run(gm)
    assert NormInRecurrences()(gm).matches == 1 and NormInRecurrences()(gm).matches == 0
    gm.recompile()
    z, norm, is_normed, eps, gate = rule_of(gm).args[7:12]
    assert z.meta["val"].shape[1:] == (HEADS, HEAD_DIM) and norm.meta["weight_name"] == "norm"  # type: ignore[union-attr]
    assert (is_normed, eps, gate) == (True, 1e-5, act)
    assert "rsqrt" not in targets(gm)
    torch.testing.assert_close(run(gm), before)


@pytest.mark.parametrize(
    ("change", "act"), [("another reader", "silu"), ("a gate of the outputs", "silu"), ("", "relu")]
)
def test_another_norm_stays(change, act):
    gm = graph(change, act)
    before = run(gm)
    assert NormInRecurrences()(gm).matches == 0
    assert torch.equal(run(gm), before)
