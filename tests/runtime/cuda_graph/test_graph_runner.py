"""The graphs that a batch runs in, captures and estimates, as far as visible without a GPU
(tests/gpu/test_cuda_graphs.py has the rest)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mllm_compile.runtime.attention.torch_backend import TorchAttnBackend
from mllm_compile.runtime.cuda_graph import graph_runner, padding
from mllm_compile.runtime.cuda_graph.dispatcher import GraphDispatcher
from mllm_compile.runtime.cuda_graph.graph_runner import GraphRunner, estimate_graph_bytes
from mllm_compile.runtime.cuda_graph.kind import BatchGraphs
from mllm_compile.runtime.errors import ConfigError
from mllm_compile.runtime.forward_batch import ForwardMode
from mllm_compile.runtime.graph_mode import DPMetadata, GraphKind


class NamedGraphs(BatchGraphs):
    """Notes the graph of a batch."""

    def __init__(self, serves: bool = True) -> None:
        self._serves = serves

    @staticmethod
    def sizes(runner, kind):
        raise NotImplementedError

    def capture(self, descriptor):
        raise NotImplementedError

    def serves(self, batch):
        return self._serves

    def padded_batch(self, batch, descriptor):
        raise NotImplementedError

    def replay(self, batch, descriptor):
        return f"{descriptor.kind.name} of {descriptor.num_tokens}"


def graphs_of(serves_mixed: bool = True, **sizes: tuple[int, ...]) -> GraphRunner:
    graphs = object.__new__(GraphRunner)
    graphs.dispatcher = GraphDispatcher({GraphKind[kind]: of_kind for kind, of_kind in sizes.items()})
    graphs.kinds = {GraphKind[kind]: NamedGraphs(kind != "MIXED" or serves_mixed) for kind in sizes}
    return graphs


def batch_of(num_tokens=5, mode=ForwardMode.DECODE, common_prefix_len=0, dp_metadata=None, sees_ahead=False):
    return SimpleNamespace(
        forward_mode=mode,
        num_tokens=num_tokens,
        common_prefix_len=common_prefix_len,
        sees_ahead=sees_ahead,
        dp_metadata=dp_metadata,
        adapter_slots=None,
    )


@pytest.mark.parametrize(
    ("sizes", "shared", "runs"),
    [
        ({"DECODE": (8,), "PIECEWISE": (8,)}, 0, "DECODE of 8"),
        ({"DECODE": (8,), "PIECEWISE": (8,)}, 64, "PIECEWISE of 8"),
        ({"DECODE": (8,)}, 64, None),
        ({"DECODE": (4,), "PIECEWISE": (16,)}, 0, "PIECEWISE of 16"),
    ],
)
def test_a_decode_that_reads_a_prefix_once_is_not_the_captured_one(sizes, shared, runs):
    assert graphs_of(**sizes).run(batch_of(common_prefix_len=shared)) == runs


@pytest.mark.parametrize(("serves", "runs"), [(True, "MIXED of 8"), (False, "PIECEWISE of 6")])
def test_a_step_runs_piece_by_piece_where_a_whole_graph_serves_it_slowly(serves, runs):
    graphs = graphs_of(serves, MIXED=(8,), PIECEWISE=(6,))
    assert graphs.run(batch_of(mode=ForwardMode.MIXED)) == runs
    assert graphs.run(batch_of(num_tokens=9, mode=ForwardMode.EXTEND)) is None
    assert graphs.run(batch_of(mode=ForwardMode.EXTEND, sees_ahead=True)) == "PIECEWISE of 6"


def test_ranks_with_requests_of_their_own_run_the_pieces_of_the_one_that_has_most_tokens():
    graphs = graphs_of(DECODE=(8,), MIXED=(8, 32), PIECEWISE=(8, 32))
    assert graphs.run(batch_of(num_tokens=2, dp_metadata=DPMetadata((2, 9)))) == "PIECEWISE of 32"


def test_attention_that_knows_of_no_graphs_is_between_captured_pieces(monkeypatch):
    monkeypatch.setattr(graph_runner, "GraphCapturer", lambda *args: None)
    monkeypatch.setattr(padding, "StepInputs", lambda *args: None)
    runner = SimpleNamespace(
        attn_backend=TorchAttnBackend(),
        device="cpu",
        config=SimpleNamespace(max_attended=2),
        model=SimpleNamespace(executor=None, reads_hidden_states=False, lora=None),
        dp_size=1,
        always_takes_features=False,
    )
    with pytest.raises(ConfigError, match="need a compiled program"):  # it came as far as the program
        GraphRunner(runner, GraphDispatcher({GraphKind.PIECEWISE: (8,)}))
    with pytest.raises(RuntimeError, match="does not capture such steps"):
        GraphRunner(runner, GraphDispatcher({GraphKind.DECODE: (8,)}))


def test_memory_is_estimated_by_the_two_largest_sizes_of_each_kind_and_of_decodes_once(monkeypatch):
    """The first graph of a kind takes 10 MiB, every further one as many as its kind's number."""
    captured = []

    class Graphs:
        def __init__(self, runner, dispatcher) -> None:
            descriptors = dispatcher.descriptors()
            captured.extend((descriptor.kind, descriptor.num_tokens) for descriptor in descriptors)
            seen = set()
            self.figures = []
            for descriptor in descriptors:
                mib = descriptor.kind.value if descriptor.kind in seen else 10
                seen.add(descriptor.kind)
                self.figures.append(SimpleNamespace(kind=descriptor.kind, mib=mib))

        def capture(self) -> None:
            pass

    monkeypatch.setattr(graph_runner, "GraphRunner", Graphs)
    decodes = {kind: (1, 2, 4) for kind in GraphKind if kind.is_decode}
    found = estimate_graph_bytes(None, GraphDispatcher({GraphKind.MIXED: (8, 16, 32, 64), **decodes}))
    assert set(captured) == {(GraphKind.MIXED, size) for size in (32, 64)} | {
        (GraphKind.DECODE, size) for size in (2, 4)
    }
    mixed = 10 + 3 * GraphKind.MIXED.value
    assert found == (mixed + 10 + (4 * 3 - 1) * GraphKind.DECODE.value) * 2**20
    assert estimate_graph_bytes(None, GraphDispatcher({})) == estimate_graph_bytes(None, GraphDispatcher({}), 7) == 0
    behind = estimate_graph_bytes(None, GraphDispatcher(decodes), 7) - estimate_graph_bytes(
        None, GraphDispatcher(decodes)
    )
    assert behind == 7 * GraphKind.DECODE.value * 2**20
