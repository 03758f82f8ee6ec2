"""gate_in_recurrences: which gates it takes, that numbers stay as they are, and what it leaves alone."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from mllm_compile.passes.gate_in_recurrences import GateInRecurrences
from mllm_compile.passes.match.nodes import is_op
from tests.passes.support.graph_builder import HEAD_DIM, HEADS, HIDDEN, GraphBuilder, apply, run, targets


def negative_exponential(builder: GraphBuilder, name: str, *shape: int, **dtype: torch.dtype) -> fx.Node:
    """-exp of a weight, as Mamba and gated delta nets have their rates."""
    weight = builder.method("float", builder.weight(name, *shape, **dtype))
    return builder.call(operator.neg, builder.method("exp", weight))


def heads_of(builder: GraphBuilder, x: fx.Node) -> fx.Node:
    return builder.method("view", x, builder.size_inputs["T"], HEADS, HEAD_DIM)


def delta_graph(change: str = "", dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    """A gated delta rule whose gates are made as Qwen3.5 makes them, but for `change`."""
    builder = GraphBuilder()
    x = builder.embed()
    heads = heads_of(builder, x)
    a, b = (builder.call(torch.unsqueeze, builder.linear(x, name, HEADS), 0) for name in "ab")
    shift = builder.weight("dt_bias", HEADS)
    if change == "a shift of each token":
        shift = builder.linear(x, "shift", HEADS)
    size = builder.call(torch.nn.functional.softplus, builder.call(torch.add, builder.method("float", a), shift))
    rate = negative_exponential(builder, "A_log", HEADS, dtype=dtype)
    pair = (size, rate) if change == "turned" else (rate, size)
    g = builder.call(operator.mul, *pair)
    beta = builder.call(torch.relu if change == "another beta" else torch.sigmoid, b)
    gates = [builder.call(operator.getitem, value, 0) for value in (g, beta)]
    op = torch.ops.mllm.gated_delta.default
    out = builder.call(op, heads, heads, heads, *gates, None, None, None, None, True, 0.0, "", "")
    logits = builder.head(builder.method("flatten", out, 1))
    if change == "another reader":
        logits = builder.call(operator.add, logits, builder.call(torch.sum, g))
    return builder.canonical(logits)


def layer_of(gm: fx.GraphModule) -> fx.Node:
    return next(node for node in gm.graph.nodes if is_op(node, "gated_delta", "ssd", "selective_scan"))


@pytest.mark.parametrize("change", ["", "turned", "another reader"])
def test_gates_of_a_delta_rule_are_made_where_they_are_read(change):
    gm = delta_graph(change)
    before = run(gm)
    result = GateInRecurrences()(gm)
    assert result.matches == 1 and GateInRecurrences()(gm).matches == 0
    result.gm.recompile()
    g, beta, a_log, dt_bias = layer_of(gm).args[3:7]
    assert (a_log.meta["weight_name"], dt_bias.meta["weight_name"]) == ("A_log", "dt_bias")  # type: ignore[union-attr]
    assert g.meta["val"].shape[1:] == beta.meta["val"].shape[1:] == (HEADS,)  # type: ignore[union-attr]
    assert ("exp" in targets(gm)) == (change == "another reader")
    assert torch.equal(run(gm), before)


@pytest.mark.parametrize("change", ["a shift of each token", "another beta"])
def test_gates_that_are_made_otherwise_stay(change):
    assert GateInRecurrences()(delta_graph(change)).matches == 0


def test_a_weight_of_16_bits_is_read_as_it_is():
    gm = delta_graph(dtype=torch.bfloat16)
    before = run(gm)
    gm = apply(GateInRecurrences(), gm)
    assert layer_of(gm).args[5].meta["val"].dtype == torch.bfloat16  # type: ignore[union-attr]
    assert torch.equal(run(gm), before)


def scan(builder: GraphBuilder, name: str, of_log: bool) -> fx.Node:
    x = builder.embed()
    numbers = builder.linear(x, "numbers", 3)
    shape = (HEADS,) if name == "ssd" else (HIDDEN, 3)
    rates = negative_exponential(builder, "A_log", *shape) if of_log else builder.weight("A", *shape)
    if name == "ssd":
        group = builder.call(torch.unsqueeze, numbers, 1)
        given: tuple[Any, ...] = (
            heads_of(builder, x),
            builder.linear(x, "dt", HEADS),
            rates,
            group,
            group,
            *[None] * 4,
        )
        settings = (True, 0.0, None, False, 0.0, 1, "")
        return builder.method("flatten", builder.call(torch.ops.mllm.ssd.default, *given, *settings), 1)
    given = (x, builder.linear(x, "dt", HIDDEN), rates, numbers, numbers, None, None, None)
    return builder.call(torch.ops.mllm.selective_scan.default, *given, True, False, "")


@pytest.mark.parametrize("name", ["ssd", "selective_scan"])
def test_rates_of_scans_are_read_as_logarithms(name):
    builder = GraphBuilder()
    gm = builder.canonical(builder.head(scan(builder, name, of_log=True)))
    before = run(gm)
    assert GateInRecurrences()(gm).matches == 1 and GateInRecurrences()(gm).matches == 0
    gm.recompile()
    assert layer_of(gm).args[12 if name == "ssd" else -2] is True and "exp" not in targets(gm)
    assert torch.equal(run(gm), before)
    builder = GraphBuilder()
    assert GateInRecurrences()(builder.canonical(builder.head(scan(builder, name, of_log=False)))).matches == 0
