"""The walks of docs/adding.md that add a pass, and a pass with a kernel: in a copy of the product."""

from __future__ import annotations

from tests.scratch_tree import copy_with, run_in

# A pass over the graph as it was traced. File → its text, or an old text and its replacement.
PASS = {
    "passes/drop_negations.py": '''"""Takes away a negation of a negation."""

import operator
from typing import ClassVar

from mllm_compile.passes.base import GraphPass, PassResult
from mllm_compile.passes.match.nodes import drop_dead_nodes, is_call


class DropNegations(GraphPass):
    """Reads what was negated twice."""

    name: ClassVar[str] = "drop_negations"

    def __call__(self, gm):
        before, matches = len(gm.graph.nodes), 0
        for node in gm.graph.nodes:
            if is_call(node, operator.neg) and is_call(node.args[0], operator.neg):
                node.replace_all_uses_with(node.args[0].args[0])
                matches += 1
        drop_dead_nodes(gm)
        return PassResult(gm, matches, before, len(gm.graph.nodes))
''',
}
# And one over pieces, which puts an op of ours into them.
KERNEL_PASS = {
    "runtime/ops/squared.py": '''"""The op of squares, in plain torch."""

import torch

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")
_LIBRARY.define("squared(Tensor x) -> Tensor")
_LIBRARY.impl("squared", torch.square, "CompositeExplicitAutograd")
torch.library.register_fake("mllm::squared", torch.empty_like, lib=_LIBRARY)
''',
    "passes/fuse_squares.py": '''"""Puts the op of squares into pieces."""

import operator
from typing import ClassVar

from mllm_compile.passes.base import GraphPass, PassResult
from mllm_compile.passes.match.nodes import called_pieces, is_call, replace_by_op, rewrite_pieces
from mllm_compile.runtime.ops import op


class FuseSquares(GraphPass):
    """Multiplies what is multiplied by itself in one kernel."""

    name: ClassVar[str] = "fuse_squares"
    needs: ClassVar[tuple[str, ...]] = ("squared",)

    def __call__(self, gm):
        before = len(gm.graph.nodes)
        matches = rewrite_pieces(gm, called_pieces(gm), _fuse)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _fuse(graph, node):
    if not is_call(node, operator.mul) or node.args[0] is not node.args[1]:
        return False
    replace_by_op(graph, node, op("squared"), node.args[0])
    return True
''',
}
_BASE = "from mllm_compile.passes.base import GraphPass"
LINES = [
    (_BASE, f"from mllm_compile.passes.drop_negations import DropNegations\n{_BASE}"),
    ("    MultiplyPatches,  #", "    DropNegations,\n    MultiplyPatches,  #"),
]
KERNEL_LINES = [
    (
        "from mllm_compile.passes.canonicalise",
        "from mllm_compile.passes.fuse_squares import FuseSquares\nfrom mllm_compile.passes.canonicalise",
    ),
    ("    ChooseExperts,  #", "    FuseSquares,\n    ChooseExperts,  #"),
]
CHANGED = {
    "passes/pipeline.py": LINES + KERNEL_LINES,
    "runtime/ops/__init__.py": ("OPS = {\n", 'OPS = {\n    "squared": "squared",\n'),
}

# The passes are listed, run, verified, left out by name and noticed by the cache key, by what no step has touched.
SERVES = """
import operator
import torch
from mllm_compile.passes.base import PassTarget
from mllm_compile.passes.match import nodes
from mllm_compile.passes.pipeline import optional_pass_names, passes_left_out, run_passes
from mllm_compile.passes.verify import verify_graph
from mllm_compile.store.key import _pass_sources
from tests.passes.support.graph_builder import GraphBuilder, model_of_layers, run, text

def traced():
    builder = GraphBuilder()
    x = builder.layer(builder.embed(), 0)
    x = builder.call(torch.neg, builder.method("neg", x))
    x = builder.call(operator.add, x, builder.call(torch.mul, x, x))
    return builder.finish(builder.head(builder.layer(x, 1)))

assert {"drop_negations", "fuse_squares"} < set(optional_pass_names())
on_cpu = PassTarget("cpu", False, False, False, "float32", "float32")
assert "its kernels do not run on a CPU" in passes_left_out(on_cpu)["fuse_squares"]
assert "drop_negations" not in passes_left_out(on_cpu)
others = set(passes_left_out(on_cpu)) - {"fuse_squares"}
expected = run(traced())

gm, reports = run_passes(traced(), others)
matches = {report.name: report.matches for report in reports}
assert matches["drop_negations"] == matches["fuse_squares"] == 1
assert "squared" in text(gm) and "neg" not in text(gm)
torch.testing.assert_close(run(gm), expected)

gm, reports = run_passes(traced(), others | {"drop_negations", "fuse_squares"})
assert "squared" not in text(gm) and text(gm).count("= -") == 2
torch.testing.assert_close(run(gm), expected)

builder, logits = model_of_layers()
_, reports = run_passes(builder.finish(logits), others)
assert {report.name: report.matches for report in reports}["drop_negations"] == 0
assert "drop_negations.py " in _pass_sources() and "fuse_squares.py " in _pass_sources()
"""


def test_the_walks_run_verify_and_leave_out_a_pass_of_two_files_and_one_with_a_kernel_of_four(tmp_path):
    assert len(PASS | {"passes/pipeline.py": LINES}) == 2
    assert len(KERNEL_PASS | CHANGED) == 4
    copy_with(tmp_path, PASS | KERNEL_PASS, CHANGED)
    run_in(tmp_path, SERVES)
