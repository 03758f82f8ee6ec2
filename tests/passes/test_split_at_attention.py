"""split_at_attention: where the cuts are, and what crosses them."""

from __future__ import annotations

import operator

import torch
from torch import fx

from mllm_compile.passes.match.nodes import is_symbolic
from mllm_compile.passes.split_at_attention import SplitAtAttention
from mllm_compile.passes.verify import verify_graph
from tests.passes.support.graph_builder import HIDDEN, GraphBuilder, apply, done, model_of_layers, run, targets


def split(gm: fx.GraphModule) -> fx.GraphModule:
    gm = apply(SplitAtAttention(), gm)
    verify_graph(gm, done("split_at_attention"))
    return gm


def crossing(gm: fx.GraphModule) -> list[torch.Tensor]:
    """Values that go into pieces."""
    return [arg.meta["val"] for node in gm.graph.nodes if node.op == "call_module" for arg in node.args]


def calls(gm: fx.GraphModule) -> list[str]:
    """Pieces and attentions, in order."""
    return [name for name in targets(gm) if name.startswith(("piece", "attention"))]


def test_it_cuts_at_every_attention_and_before_the_row_gather():
    builder, logits = model_of_layers(2)
    result = SplitAtAttention()(builder.lowered(logits))
    assert result.matches == 4
    attention = "attention_with_output.default"
    assert calls(result.gm) == ["piece_0", attention, "piece_1", attention, "piece_2", "piece_3"]
    head = result.gm.get_submodule("piece_3")
    assert targets(head) == ["index_select", "linear"]


def test_without_attention_there_is_a_body_and_a_head():
    builder = GraphBuilder()
    gm = split(builder.lowered(builder.head(builder.call(torch.relu, builder.embed()))))
    assert calls(gm) == ["piece_0", "piece_1"]


def test_attention_that_directly_follows_attention_has_no_empty_piece_between():
    builder = GraphBuilder()
    q = builder.linear(builder.embed(), "q", HIDDEN)
    heads = builder.method("view", q, builder.size_inputs["T"], 4, 4)
    said = (None, 0.5, 0.0, -1, "")
    op = torch.ops.mllm.attention.default
    first = builder.call(op, heads, heads, heads, *said)
    out = builder.method("flatten", builder.call(op, first, heads, heads, *said), 1)
    gm = builder.lowered(builder.head(out))
    before = run(gm)
    gm = split(gm)
    assert [name.partition("_")[0] for name in calls(gm)] == ["piece", "attention", "attention", "piece", "piece"]
    torch.testing.assert_close(run(gm), before, rtol=0, atol=0)


def test_a_value_read_by_several_pieces_crosses_every_cut_between():
    builder = GraphBuilder()
    x = builder.embed()
    y = builder.layer(builder.layer(x, 0), 1)
    gm = builder.lowered(builder.head(builder.call(torch.add, y, x)))
    before = run(gm)
    gm = split(gm)
    embedding = gm.get_submodule("piece_0")
    assert "embedding" in targets(embedding)
    readers = [user for node in gm.graph.nodes if node.op == "call_module" for user in node.users]
    assert any(len(user.users) == 2 for user in readers), "the embedding goes into piece_1 and piece_2"
    torch.testing.assert_close(run(gm), before, rtol=0, atol=0)


def test_a_part_of_a_tuple_stays_with_what_makes_the_tuple():
    builder = GraphBuilder()
    chunks = builder.call(torch.chunk, builder.embed(), 2, -1)
    first, second = (builder.call(operator.getitem, chunks, index) for index in range(2))
    q = builder.linear(first, "q", HIDDEN)
    out = builder.linear(builder.attention(q, q, q), "o", HIDDEN // 2)
    # The second half is taken after the attention.
    late = builder.call(operator.getitem, chunks, 1)
    gm = builder.lowered(builder.head(builder.call(torch.add, out, builder.call(torch.mul, second, late))))
    before = run(gm)
    gm = split(gm)
    assert all(isinstance(value, torch.Tensor) for value in crossing(gm))
    torch.testing.assert_close(run(gm), before, rtol=0, atol=0)


def test_a_size_is_made_again_in_each_piece_that_reads_it():
    builder = GraphBuilder()
    doubled = builder.call(operator.mul, builder.size_inputs["T"], 2)
    x = builder.embed()
    for index in range(2):
        x = builder.method("view", x, doubled, HIDDEN // 2)
        x = builder.method("view", builder.call(torch.relu, x), builder.size_inputs["T"], HIDDEN)
        x = builder.layer(x, index)
    gm = builder.lowered(builder.head(x))
    before = run(gm)
    gm = split(gm)
    assert not any(is_symbolic(value) for value in crossing(gm))
    assert [targets(piece).count("mul") for _, piece in gm.named_children()] == [1, 1, 0, 0]
    torch.testing.assert_close(run(gm), before, rtol=0, atol=0)


def test_numbers_are_bitwise_the_same_for_any_number_of_tokens():
    builder, logits = model_of_layers(3)
    gm = builder.lowered(logits)
    before = [run(gm, num_tokens) for num_tokens in (1, 2, 9)]
    gm = split(gm)
    for num_tokens, expected in zip((1, 2, 9), before, strict=True):
        torch.testing.assert_close(run(gm, num_tokens), expected, rtol=0, atol=0)


def test_a_part_of_what_no_piece_can_take_is_taken_where_it_is_made():
    """As Zamba's heads are of products [2, 20, T]: parts of [2, T, 20], whose strides are 20 T, 1 and T."""
    builder = GraphBuilder()
    x = builder.embed()
    products = builder.call(
        torch.matmul, builder.weight("heads", 2, 20, HIDDEN), builder.call(torch.transpose, x, 0, 1)
    )
    by_token = builder.call(torch.transpose, products, 1, 2)
    part = builder.call(operator.getitem, builder.call(torch.split, by_token, [4, HIDDEN], -1), 1)
    attended = builder.layer(x, 0)
    second = builder.call(operator.getitem, part, 1)
    gm = builder.lowered(builder.head(builder.call(torch.add, attended, second)))
    before = run(gm)
    gm = split(gm)
    strides = [[str(stride) for stride in val.stride()] for val in crossing(gm) if not is_symbolic(val)]
    assert not any("20*" in stride for one in strides for stride in one)
    torch.testing.assert_close(run(gm), before, rtol=0, atol=0)
