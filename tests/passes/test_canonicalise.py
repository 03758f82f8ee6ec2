"""canonicalise: sizes, names and dead ends of a trace."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.nn import functional

from mllm_compile.passes.canonicalise import Canonicalise
from tests.passes.support.graph_builder import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    GraphBuilder,
    apply,
    assert_values_hold,
    model_of_layers,
    placeholders,
    run,
    targets,
)


def checked_size_graph():
    """A range check on T, and one view that takes T."""
    builder = GraphBuilder()
    tokens = builder.size_inputs["T"]
    builder.call(torch.ops.aten._assert_scalar.default, builder.call(operator.ge, tokens, 1), "T >= 1")
    x = builder.method("view", builder.embed(), 1, tokens, HIDDEN)
    return builder, builder.head(builder.method("view", x, tokens, HIDDEN))


def test_it_takes_sizes_from_tensors_drops_their_checks_and_names_inputs():
    builder, logits = checked_size_graph()
    result = Canonicalise()(builder.finish(logits))
    assert result.matches == 3, "one check and the size inputs T and S"
    assert placeholders(result.gm) == ["input_ids", "positions", "logits_indices", "embed_weight", "head_weight"]
    assert targets(result.gm) == ["sym_size.int", "embedding", "view", "view", "index_select", "linear"]
    assert result.nodes_before - result.nodes_after == 3, "T, S, the check, its condition; one node takes their place"


def test_it_leaves_alone_what_is_read_and_the_batch_inputs():
    builder = GraphBuilder()
    logits = builder.head(builder.call(torch.mul, builder.embed(), builder.weight("scale", HIDDEN)))
    gm = apply(Canonicalise(), builder.finish(logits))
    assert "positions" in placeholders(gm), "a batch input is part of the program's variant even when nobody reads it"
    assert targets(gm) == ["embedding", "mul", "index_select", "linear"]


def copied_heads(reads_copy: bool):
    """Embeddings as heads, which are transposed, copied and transposed again; the copy may be read by others too."""
    builder = GraphBuilder()
    tokens = builder.size_inputs["T"]
    heads = builder.method("view", builder.embed(), 1, tokens, HEADS, HEAD_DIM)
    copy = builder.method("contiguous", builder.method("transpose", heads, 1, 2))
    x = builder.method("reshape", builder.method("transpose", copy, 1, 2), tokens, HIDDEN)
    return builder, builder.call(torch.add, x, builder.method("view", copy, tokens, HIDDEN)) if reads_copy else x


def test_heads_are_not_copied_between_a_transposition_and_its_inverse():
    builder, x = copied_heads(reads_copy=False)
    gm = builder.finish(builder.head(x))
    before = run(gm)
    gm = apply(Canonicalise(), gm)
    assert "contiguous" not in targets(gm) and targets(gm).count("transpose") == 2
    assert_values_hold(gm)
    torch.testing.assert_close(run(gm), before, rtol=0, atol=0)


def test_a_copy_stays_whose_strides_something_may_count_on():
    builder, x = copied_heads(reads_copy=True)
    assert "contiguous" in targets(builder.canonical(builder.head(x)))


@pytest.mark.parametrize("training", [False, True])
def test_a_dropout_goes_that_drops_nothing(training):
    builder = GraphBuilder()
    dropped = builder.call(functional.dropout, builder.embed(), p=0.5, training=training)
    gm = builder.canonical(builder.head(dropped))
    assert ("dropout" in targets(gm)) == training
    assert_values_hold(gm)


def test_a_weight_that_nobody_reads_is_no_input():
    builder = GraphBuilder()
    builder.weight("unread", 3)
    assert "unread" not in placeholders(builder.canonical(builder.head(builder.embed())))


def test_what_writes_in_place_becomes_a_value_of_its_own():
    builder = GraphBuilder()
    x = builder.method("clone", builder.embed())
    builder.method("mul_", x, 2.0)
    builder.call(operator.iadd, x, 1.0)
    gm = builder.finish(builder.head(x))
    before = run(gm)
    result = Canonicalise()(gm)
    assert result.matches == 4, "T and S, and two writes"
    assert targets(result.gm) == ["embedding", "clone", "mul", "add", "index_select", "linear"]
    result.gm.recompile()
    torch.testing.assert_close(run(result.gm), before, rtol=0, atol=0)


def test_weights_whose_names_make_one_identifier_stay_two_inputs():
    builder = GraphBuilder()
    x = builder.call(torch.add, builder.embed(), builder.weight("a.b_c", HIDDEN))
    gm = builder.finish(builder.head(builder.call(torch.mul, x, builder.weight("a_b.c", HIDDEN))))
    before = run(gm)
    torch.testing.assert_close(run(apply(Canonicalise(), gm)), before, rtol=0, atol=0)


def test_all_readers_of_a_size_read_one_node():
    builder, logits = model_of_layers(2)
    gm = builder.canonical(logits)
    assert targets(gm).count("sym_size.int") == 1
    assert targets(gm).count("view") == 6


def test_a_graph_is_of_no_gpu_in_particular():
    builder = GraphBuilder()
    node = builder.method("to", builder.embed(), torch.device("cpu"))
    gm = builder.finish(builder.head(node))
    node.args = (node.args[0], torch.device("cuda", 1))
    result = Canonicalise()(gm)
    assert result.matches == 3, "T and S, and the device"
    assert node.args[1] == torch.device("cuda")
