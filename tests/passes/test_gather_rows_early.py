"""passes/gather_rows_early.py: the last layer is computed of the wanted rows, where each token stands for itself."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.nn.functional import silu

from mllm_compile.passes.absorb_latents import AbsorbLatents
from mllm_compile.passes.gather_rows_early import GatherRowsEarly
from mllm_compile.passes.lower_attention import LowerAttention
from mllm_compile.passes.match.nodes import is_attention_with_output
from mllm_compile.passes.split_at_attention import SplitAtAttention
from mllm_compile.passes.verify import verify_graph
from tests.passes.support.graph_builder import HIDDEN, VOCAB, GraphBuilder, apply, done, run, targets
from tests.passes.support.latent_layer import latent_layer

Body = Callable[[GraphBuilder, fx.Node], fx.Node]


def head(builder: GraphBuilder, x: fx.Node) -> fx.Node:
    """As Transformers gathers with `logits_to_keep`; x [1, T, HIDDEN]."""
    everything = slice(None)
    rows = builder.call(operator.getitem, x, (everything, builder.rows, everything))
    return builder.call(operator.getitem, builder.linear(rows, "head", VOCAB), 0)


def norm(builder: GraphBuilder, x: fx.Node, name: str) -> fx.Node:
    wide = builder.method("to", x, torch.float32)
    variance = builder.method("mean", builder.method("pow", wide, 2), -1, True)
    factor = builder.call(torch.rsqrt, builder.call(operator.add, variance, 1e-6))
    return builder.call(
        operator.mul, builder.weight(f"{name}.weight", HIDDEN), builder.call(operator.mul, wide, factor)
    )


def feed_forward(builder: GraphBuilder, x: fx.Node) -> fx.Node:
    """Behind the last attention of most models: a linear with its residual, a norm, a gated feed-forward."""
    gate_up = builder.linear(norm(builder, x, "norm"), "gate_up", 24)
    halves = builder.call(torch.functional.split, gate_up, [12, 12], dim=-1)
    gate, up = (builder.call(operator.getitem, halves, index) for index in range(2))
    product = builder.call(operator.mul, builder.call(silu, gate), up)
    return norm(builder, builder.call(operator.add, x, builder.linear(product, "down", HIDDEN)), "last")


def model(body: Body, layers: int = 2) -> fx.GraphModule:
    """Layers, then `body` of [1, T, HIDDEN], and the head."""
    builder = GraphBuilder()
    x = builder.embed()
    for index in range(layers):
        x = builder.layer(x, index)
    return builder.lowered(head(builder, body(builder, builder.method("unsqueeze", x, 0))))


def behind_attention(gm: fx.GraphModule) -> list[fx.Node]:
    nodes = list(gm.graph.nodes)
    return nodes[max(index for index, node in enumerate(nodes) if is_attention_with_output(node)) + 1 :]


def assert_moved(gm: fx.GraphModule) -> fx.GraphModule:
    before, tokens = run(gm), gm.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0]
    result = GatherRowsEarly()(gm)
    assert result.matches == 1
    verify_graph(result.gm, done("gather_rows_early"))
    result.gm.recompile()
    torch.testing.assert_close(run(result.gm), before)
    for node in behind_attention(result.gm):
        shapes = [str(size) for size in getattr(node.meta.get("val"), "shape", ())]
        assert str(tokens) not in shapes, f"{node.name} is of all tokens"
    return result.gm


def test_what_is_behind_attention_over_latents_is_computed_of_the_wanted_rows():
    builder = GraphBuilder()
    x = builder.method("unsqueeze", latent_layer(builder, builder.embed()), 0)
    gm = builder.canonical(head(builder, feed_forward(builder, x)))
    gm = assert_moved(apply(LowerAttention(), apply(AbsorbLatents(), gm)))
    assert "bmm" in [node.target.__name__ for node in behind_attention(gm) if callable(node.target)]


def test_a_product_whose_rows_are_no_tokens_stays():
    def of_columns(builder: GraphBuilder, x: fx.Node) -> fx.Node:
        by_column = builder.call(torch.transpose, x, 1, 2)  # [1, HIDDEN, T]
        weight = builder.call(torch.unsqueeze, builder.weight("w", HIDDEN, HIDDEN), 0)
        return builder.call(torch.transpose, builder.call(torch.bmm, weight, by_column), 1, 2)

    gm = model(of_columns)
    assert GatherRowsEarly()(gm).matches == 0


def test_the_last_layer_is_computed_of_the_wanted_rows():
    gm = assert_moved(model(feed_forward))
    gathers = [node for node in gm.graph.nodes if any(arg.name == "logits_indices" for arg in node.all_input_nodes)]
    assert len(gathers) == 2, "the residual and attention's output"


def test_the_head_stays_a_piece_of_its_own():
    gm = apply(SplitAtAttention(), assert_moved(model(feed_forward)))
    verify_graph(gm, done("split_at_attention"))
    calls = [name for name in targets(gm) if name.startswith(("piece", "attention"))]
    attention = "attention_with_output.default"
    assert calls == ["piece_0", attention, "piece_1", attention, "piece_2", "piece_3"]
    tail, of_head = gm.get_submodule("piece_2"), gm.get_submodule("piece_3")
    assert "logits_indices" in [node.name for node in tail.graph.nodes if node.op == "placeholder"]
    assert targets(of_head) == ["linear", "getitem"]
    before = run(model(feed_forward))
    torch.testing.assert_close(run(gm), before)


def views(builder: GraphBuilder, x: fx.Node) -> fx.Node:
    heads = builder.method("view", x, 1, builder.size_inputs["T"], 4, -1)
    return builder.method("contiguous", builder.method("reshape", heads, 1, builder.size_inputs["T"], -1))


def as_opt_views(builder: GraphBuilder, x: fx.Node) -> fx.Node:
    """To rows and back to `x.size()`, the sizes as one value (OPT)."""
    flat = builder.call(torch.nn.functional.layer_norm, builder.method("reshape", x, -1, HIDDEN), (HIDDEN,))
    return builder.method("view", flat, builder.method("size", x))


def as_gpt_bigcode_views(builder: GraphBuilder, x: fx.Node) -> fx.Node:
    """To sizes that were put together (GPT BigCode)."""
    sizes = builder.call(torch.Size, [1, builder.size_inputs["T"], HIDDEN])
    return builder.method("view", builder.call(torch.relu, x), sizes)


def in_place(builder: GraphBuilder, x: fx.Node) -> fx.Node:
    y = builder.call(torch.relu, x)
    builder.method("mul_", y, 2)
    return y


@pytest.mark.parametrize(
    "body",
    [
        in_place,
        views,
        as_opt_views,
        as_gpt_bigcode_views,
        lambda builder, x: builder.call(torch.tanh, builder.linear(x, "last", HIDDEN, bias=True)),
        lambda builder, x: builder.method("unsqueeze", builder.method("flatten", x, 0, 1), 0),
        lambda builder, x: builder.call(
            operator.add, builder.call(operator.getitem, builder.method("chunk", x, 1, -1), 0), 1
        ),
    ],
)
def test_it_moves_through_what_works_on_each_token(body):
    assert_moved(model(body))


def is_told_its_sizes(builder: GraphBuilder, x: fx.Node) -> fx.Node:
    """More rows than tokens: no size of them is the number of tokens."""
    sizes = builder.call(torch.Size, [1, builder.call(operator.mul, builder.size_inputs["T"], 2), HIDDEN // 2])
    return builder.method("view", builder.method("view", x, sizes), builder.method("size", x))


def is_multiplied_by_the_number_of_tokens(builder: GraphBuilder, x: fx.Node) -> fx.Node:
    sizes = builder.method("size", x)
    return builder.call(operator.mul, x, builder.call(operator.getitem, sizes, 1))


def writes_a_part(builder: GraphBuilder, x: fx.Node) -> fx.Node:
    y = builder.call(torch.relu, x)
    written = builder.graph.call_function(operator.setitem, (y, (slice(None), slice(None), 0), 5.0))
    written.meta["val"] = None
    return y


@pytest.mark.parametrize(
    "body",
    [
        lambda builder, x: builder.method("cumsum", x, 1),
        lambda builder, x: builder.call(torch.softmax, x, 1),
        lambda builder, x: builder.method("flip", x, 1),
        lambda builder, x: builder.method("roll", x, 1, 1),
        lambda builder, x: builder.call(operator.add, x, builder.method("flip", x, 1)),
        is_told_its_sizes,
        is_multiplied_by_the_number_of_tokens,
        writes_a_part,
        lambda builder, x: builder.call(operator.mul, x, builder.size_inputs["T"]),
        lambda builder, x: builder.call(operator.truediv, x, builder.call(operator.add, builder.size_inputs["T"], 1)),
    ],
)
def test_what_looks_at_other_tokens_stays_of_all(body):
    gm = model(body)
    before = run(gm)
    result = GatherRowsEarly()(gm)
    assert result.matches == 0 and result.nodes_after == result.nodes_before
    assert torch.equal(run(gm), before)


def test_what_is_the_same_for_all_tokens_is_still_made_of_all():
    gm = model(lambda builder, x: builder.call(operator.sub, x, builder.method("mean", x, 1, True)))
    before = run(gm)
    result = GatherRowsEarly()(gm)
    result.gm.recompile()
    assert result.matches == 1
    torch.testing.assert_close(run(result.gm), before)


def test_without_attention_there_is_nowhere_to_move_to():
    assert GatherRowsEarly()(model(feed_forward, layers=0)).matches == 0


def test_rows_that_are_read_twice_stay():
    builder = GraphBuilder()
    x = builder.method("unsqueeze", builder.layer(builder.embed(), 0), 0)
    first, second = head(builder, feed_forward(builder, x)), builder.call(torch.index_select, x, 1, builder.rows)
    first = builder.call(operator.add, first, builder.method("sum", second))
    assert GatherRowsEarly()(builder.lowered(first)).matches == 0


def test_a_gather_of_another_dimension_stays():
    builder = GraphBuilder()
    x = builder.method("unsqueeze", builder.layer(builder.embed(), 0), 0)
    rows = builder.call(operator.getitem, builder.call(torch.relu, x), (slice(None), slice(None), builder.rows))
    assert GatherRowsEarly()(builder.lowered(rows)).matches == 0


def test_rows_that_are_copied_stay():
    builder = GraphBuilder()
    builder.layer(builder.embed(), 0)
    rows = builder.call(operator.getitem, builder.rows, slice(None))
    assert GatherRowsEarly()(builder.lowered(builder.method("float", rows))).matches == 0


def test_part_of_a_tuple_from_before_the_attention_stays():
    builder = GraphBuilder()
    x = builder.method("unsqueeze", builder.embed(), 0)
    halves = builder.method("chunk", x, 1, -1)
    out = builder.method("unsqueeze", builder.layer(builder.method("flatten", x, 0, 1), 0), 0)
    late = builder.call(operator.getitem, halves, 0)
    gm = builder.lowered(head(builder, builder.call(operator.add, out, late)))
    before = run(gm)
    gm = apply(GatherRowsEarly(), gm)
    torch.testing.assert_close(run(gm), before)


def test_a_head_that_reads_more_than_the_rows_stays():
    builder = GraphBuilder()
    x = builder.method("unsqueeze", builder.layer(builder.embed(), 0), 0)
    mean = builder.method("mean", x, 1, True)
    rows = builder.call(operator.getitem, builder.call(torch.relu, x), (slice(None), builder.rows, slice(None)))
    assert GatherRowsEarly()(builder.lowered(builder.call(operator.add, mean, rows))).matches == 0


@pytest.mark.parametrize(("training", "matches"), [(False, 1), (True, 0)])
def test_dropout_that_does_nothing_is_no_obstacle(training, matches):
    def body(builder: GraphBuilder, x: fx.Node) -> fx.Node:
        norm = builder.call(torch.nn.functional.layer_norm, x, (HIDDEN,))
        return builder.call(torch.nn.functional.dropout, norm, 0.1, training)

    assert GatherRowsEarly()(model(body)).matches == matches
