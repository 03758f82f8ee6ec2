"""The walk of docs/lab/adding.md that adds a kind of graph: in a copy of the product."""

from __future__ import annotations

from tests.scratch_tree import copy_with, run_in

# Graphs of prompts of one token. File → its text, or an old text and its replacement.
NEW = {
    "runtime/cuda_graph/single.py": '''"""SINGLE: one graph for a step of one prompt token."""

from mllm_compile.runtime.cuda_graph.kind import BatchGraphs
from mllm_compile.runtime.cuda_graph.padding import PaddedBatch


class SingleGraphs(BatchGraphs):
    """See the module's header."""

    def __init__(self, setting):
        super().__init__(setting)
        self._batches = {}

    @staticmethod
    def sizes(runner, kind):
        return (1,)

    def capture(self, descriptor):
        size, padded = descriptor.num_tokens, self._padded
        whole = PaddedBatch(padded.prompts(size), padded.tokens(size), padded.all_rows(size))
        self._batches[size] = self._setting.capturer.capture(lambda: whole)

    def serves(self, batch):
        return batch.batch_size == 1

    def padded_batch(self, batch, descriptor):
        self._padded.take_tokens(batch, descriptor.num_tokens)
        return self._batches[descriptor.num_tokens]

    def replay(self, batch, descriptor):
        tokens = self.padded_batch(batch, descriptor).tokens
        self._runner.attn_backend.init_forward_metadata(batch)
        return self._runner.program.run(batch, tokens, self._padded.rows_of(batch))
''',
}
CHANGED = {
    "runtime/graph_mode.py": ("    MIXED = auto()", "    SINGLE = auto()\n    MIXED = auto()"),
    "runtime/cuda_graph/kinds.py": (
        "    GraphKind.MIXED: MixedGraphs,\n",
        "    GraphKind.MIXED: MixedGraphs,\n    GraphKind.SINGLE: SingleGraphs,\n",
    ),
    "runtime/cuda_graph/dispatcher.py": (
        "_OF_STEPS = (GraphKind.MIXED,",
        "_OF_STEPS = (GraphKind.SINGLE, GraphKind.MIXED,",
    ),
}
IMPORT = ("from mllm_compile.runtime.graph_mode", "from mllm_compile.runtime.cuda_graph.single import SingleGraphs\n")

# The kind is listed, captured, estimated, measured and replayed by what no step of the walk has touched.
SERVES = """
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
import torch
from mllm_compile.runtime.config_sections import CudaGraphSection
from mllm_compile.runtime.cuda_graph import graph_runner
from mllm_compile.runtime.cuda_graph.kinds import KINDS, dispatcher_of
from mllm_compile.runtime.graph_mode import GraphKind
from tests.runtime.runner_cases import TinyModel, make_runner

class Capturer:  # which only a GPU has
    def __init__(self, device):
        self.figures = []
    def session(self):
        return nullcontext()
    def measured(self, kind, num_tokens):
        self.figures.append(SimpleNamespace(kind=kind, num_tokens=num_tokens, seconds=0.1, mib=3.0))
        return nullcontext()
    def capture(self, run):
        return run()

graph_runner.GraphCapturer = Capturer
graph_runner.ProgramExecutor = TinyModel
TinyModel.set_output_buffers = lambda self, make: None
assert set(KINDS) == set(GraphKind)
runner = make_runner(TinyModel())
runner.config = replace(runner.config, cudagraph=CudaGraphSection(mode="full", decode_requests=()))
KINDS[GraphKind.DECODE].sizes = staticmethod(lambda runner, kind: ())
dispatcher = dispatcher_of(runner)
assert [one.kind for one in dispatcher.descriptors()] == [GraphKind.SINGLE]
assert graph_runner.estimate_graph_bytes(runner, dispatcher) == 3 * 2**20
runner.graph_runner = graphs = graph_runner.GraphRunner(runner, dispatcher)
graphs.capture()
assert [figure.kind.name for figure in graphs.figures] == ["SINGLE"]

def forward(prompt):
    size = len(prompt)
    runner.req_to_token_pool.write_pages(torch.tensor([1]), torch.tensor([0]), torch.tensor([3]), 4)
    lengths = torch.tensor([size], dtype=torch.int32)
    batch = runner.prepare_forward_batch_extend(
        torch.tensor(prompt), torch.tensor([1]), lengths, lengths, lengths * 0, torch.arange(12, 12 + size)
    )
    return runner.forward(batch).next_token_logits[0]

replays, single = [], graphs.kinds[GraphKind.SINGLE]
replay = single.replay
single.replay = lambda *step: replays.append(step) or replay(*step)
for prompt in ([7], [9, 5]):
    expected = runner._source.logits(prompt)[-1]
    torch.testing.assert_close(forward(prompt), expected, atol=1e-4, rtol=1e-4)
assert len(replays) == 1, "a prompt of two tokens is no such step"
"""


def test_the_walk_that_adds_a_kind_lists_captures_estimates_and_replays_it_in_four_files(tmp_path):
    copy_with(tmp_path, NEW, CHANGED)
    table, (before, line) = tmp_path / "runtime/cuda_graph/kinds.py", IMPORT
    table.write_text(table.read_text().replace(before, line + before, 1))
    assert len(NEW | CHANGED) <= 4, "attention's part of it, if it has one, is more"
    run_in(tmp_path, SERVES)
