"""verify_graph: each invariant is found broken, and the message names the pass, the node and what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from mllm_compile.passes.base import VARIANTS
from mllm_compile.passes.pipeline import PASSES
from mllm_compile.passes.split_at_attention import SplitAtAttention
from mllm_compile.passes.variants import copy_of
from mllm_compile.passes.verify import FROM, GraphInvariantError, verify_graph
from tests.passes.support.graph_builder import GraphBuilder, apply, done, model_of_layers


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


def widen_output(piece: fx.GraphModule) -> None:
    output = piece.graph.output_node()
    with piece.graph.inserting_before(output):
        wide = piece.graph.call_method("to", (output.args[0][0], torch.float64))
    wide.meta["val"] = output.args[0][0].meta["val"].double()
    output.args = ((wide, *output.args[0][1:]),)


def add_input(piece: fx.GraphModule) -> None:
    first = next(iter(piece.graph.nodes))
    with piece.graph.inserting_before(first):
        node = piece.graph.placeholder("extra")
    node.meta["val"] = first.meta["val"]


def write_in_place(piece: fx.GraphModule) -> None:
    first = next(iter(piece.graph.nodes))
    with piece.graph.inserting_after(first):
        node = piece.graph.call_method("mul_", (first, 2.0))
    node.meta["val"] = first.meta["val"]


def spell_otherwise(piece: fx.GraphModule) -> None:
    first = next(iter(piece.graph.nodes))
    with piece.graph.inserting_after(first):
        node = piece.graph.call_function(torch.mul, (first, 2.0))
    node.meta["val"] = first.meta["val"]


def use_before_definition(piece: fx.GraphModule) -> None:
    first = next(node for node in piece.graph.nodes if node.op != "placeholder")
    piece.graph.output_node().append(first)


def with_a_variant(change: Callable[[fx.GraphModule], None]) -> fx.GraphModule:
    gm = split()
    variant = copy_of(gm.get_submodule("piece_1"))
    change(variant)
    gm.add_module("piece_1_variant", variant)
    gm.meta[VARIANTS] = {"piece_1": {8: "piece_1_variant"}}
    return gm


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
        (lambda: piece_with(add_attention), "deduplicate_pieces", "a layer inside a piece"),
        (lambda: piece_with(write_in_place), "deduplicate_pieces", r"piece_1\.mul_ .* writes into a tensor"),
        (lambda: piece_with(spell_otherwise), "fuse_silu_mul", r"piece_1\.mul.* is not spelled as"),
        (lambda: piece_with(use_before_definition), "fuse_silu_mul", "after fuse_silu_mul: .*used before it has been"),
        (lambda: piece_with(add_input), "fuse_silu_mul", r"piece_1, called by .*, has \d+ inputs in place of \d"),
        (lambda: piece_with(widen_output), "fuse_silu_mul", r"output 0 float64 \['u\d', '16'\] in place of float32"),
        (
            lambda: with_a_variant(widen_output),
            "stream_linears",
            "piece_1_variant, a variant of piece_1, has output 0 float64",
        ),
    ],
)
def test_a_broken_invariant_is_named_with_its_pass_and_node(make, after, said):
    with pytest.raises(GraphInvariantError, match=said):
        verify_graph(make(), done(after))


def test_whole_graphs_pass():
    verify_graph(traced(), ["trace"])
    verify_graph(canonical(), done("canonicalise"))
    verify_graph(split(), done("split_at_attention"))
    verify_graph(with_a_variant(lambda variant: None), done("fuse_silu_mul"))


def test_a_graph_that_fx_itself_refuses_is_refused():
    builder = GraphBuilder()
    gm = builder.canonical(builder.head(builder.embed()))
    gm.graph.call_function(torch.relu, (node_named(gm, "embedding"),)).append(node_named(gm, "embedding"))
    with pytest.raises(GraphInvariantError, match="after canonicalise: "):
        verify_graph(gm, done("canonicalise"))


def test_what_passes_bring_about_is_named_by_passes_that_always_run():
    assert set(FROM) <= {graph_pass.name for graph_pass in PASSES if graph_pass.is_required}
