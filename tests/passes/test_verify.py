"""verify_graph: each invariant is found broken, and the message names the pass, the node and what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from mllm_compile.passes.pipeline import pass_names
from mllm_compile.passes.split_at_attention import SplitAtAttention
from mllm_compile.passes.verify import AFTER, GraphInvariantError, verify_graph
from tests.passes.support.graph_builder import GraphBuilder, apply, model_of_layers


def traced() -> fx.GraphModule:
    builder, logits = model_of_layers(1)
    return builder.finish(logits)


def canonical() -> fx.GraphModule:
    builder, logits = model_of_layers(1)
    return builder.canonical(logits)


def split() -> fx.GraphModule:
    builder, logits = model_of_layers(1)
    return apply(SplitAtAttention(), builder.lowered(logits))


def node_named(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(node for node in gm.graph.nodes if node.name == name)


def without_value() -> fx.GraphModule:
    gm = canonical()
    del node_named(gm, "embedding").meta["val"]
    return gm


def without_origin() -> fx.GraphModule:
    gm = canonical()
    del node_named(gm, "embed_weight").meta["weight_name"]
    return gm


def computing_parent() -> fx.GraphModule:
    gm = split()
    output = next(node for node in gm.graph.nodes if node.op == "output")
    with gm.graph.inserting_before(output):
        relu = gm.graph.call_function(torch.relu, (output.args[0][0],))
    relu.meta["val"] = output.args[0][0].meta["val"]
    return gm


def piece_with(change: Callable[[fx.GraphModule], None]) -> fx.GraphModule:
    gm = split()
    change(gm.get_submodule("piece_1"))
    return gm


def add_size_input(piece: fx.GraphModule) -> None:
    first = next(iter(piece.graph.nodes))
    with piece.graph.inserting_before(first):
        node = piece.graph.placeholder("tokens")
    node.meta["val"] = first.meta["val"].shape[0]


def add_attribute(piece: fx.GraphModule) -> None:
    piece.register_buffer("table", torch.zeros(2))
    with piece.graph.inserting_before(next(iter(piece.graph.nodes))):
        piece.graph.get_attr("table")


def add_attention(piece: fx.GraphModule) -> None:
    x = next(iter(piece.graph.nodes))
    with piece.graph.inserting_after(x):
        piece.graph.call_function(torch.ops.mllm.attention_with_output.default, (x, x, x, x, "layer"))


@pytest.mark.parametrize(
    ("make", "after", "said"),
    [
        (without_value, "canonicalise", r"after canonicalise: embedding has no meta\['val'\]"),
        (traced, "canonicalise", "input size_t is a size"),
        (without_origin, "pack_projections", "input embed_weight is neither a weight nor a batch input"),
        (canonical, "lower_attention", "attention_default is still a trace-time attention"),
        (computing_parent, "split_at_attention", "relu .* computes outside of a piece"),
        (lambda: piece_with(add_size_input), "split_at_attention", r"piece_1\.tokens: a size crosses a cut"),
        (lambda: piece_with(add_attribute), "deduplicate_pieces", r"piece_1\.table reads an attribute"),
        (lambda: piece_with(add_attention), "deduplicate_pieces", "attention inside a piece"),
    ],
)
def test_a_broken_invariant_is_named_with_its_pass_and_node(make, after, said):
    with pytest.raises(GraphInvariantError, match=said):
        verify_graph(make(), after)


def test_whole_graphs_pass():
    verify_graph(traced(), "trace")
    verify_graph(canonical(), "canonicalise")
    verify_graph(split(), "split_at_attention")


def test_a_graph_that_fx_itself_refuses_is_refused():
    builder = GraphBuilder()
    gm = builder.canonical(builder.head(builder.embed()))
    gm.graph.call_function(torch.relu, (node_named(gm, "embedding"),)).append(node_named(gm, "embedding"))
    with pytest.raises(RuntimeError):
        verify_graph(gm, "canonicalise")


def test_every_pass_has_invariants():
    assert list(AFTER) == pass_names()
