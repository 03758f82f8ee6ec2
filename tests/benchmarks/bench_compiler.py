"""The compiler's own stages: the passes over a graph as deep as an 8B model's."""

from mllm_compile.passes.pipeline import run_passes
from tests.passes.support.graph_builder import GraphBuilder

LAYERS = 36


def deep_graph():
    """36 layers of narrow attention and projections: as many nodes as a large model has, none of its weights."""
    builder = GraphBuilder()
    hidden = builder.embed()
    for index in range(LAYERS):
        hidden = builder.layer(hidden, index)
    return builder.finish(builder.head(hidden))


def test_all_passes_over_36_layers(measure):
    _, reports = measure(run_passes, rounds=4, setup=lambda: (deep_graph(),))
    assert sum(report.matches for report in reports) >= LAYERS
