"""Captured decodes and pieces on a CPU: a capture is played by a function that a replay runs again."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mllm_compile.runtime.attention.torch_backend import TorchAttnBackend
from mllm_compile.runtime.config_sections import CudaGraphSection
from mllm_compile.runtime.cuda_graph import decode_loop, decodes, graph_runner
from mllm_compile.runtime.cuda_graph.kinds import dispatcher_of
from mllm_compile.runtime.graph_mode import GraphKind
from mllm_compile.runtime.program.loaded import DecodeLoopPieces
from tests.runtime.runner_cases import Loop, TinyModel, make_runner
from tests.runtime.step.decode_loop_cases import begin_decode, end_decode


class Model(TinyModel):
    """A model as a program is asked for it; it has no pieces."""

    def set_output_buffers(self, make):
        self.make = make

    def wrap_pieces(self, wrap):
        self.wrap = wrap


class Graph:
    """Runs what was captured again, into the places of the first results."""

    def __init__(self, run):
        self._run, self.results = run, run()

    def replay(self):
        for place, value in zip(self.results, self._run(), strict=True):
            if place is not None:
                place.copy_(value)


class Capturer:
    def __init__(self, device):
        self.figures = []

    def session(self):
        return nullcontext()

    def measured(self, kind, num_tokens):
        self.figures.append(SimpleNamespace(kind=kind, num_tokens=num_tokens, seconds=0.1, mib=1.0))
        return nullcontext()

    def capture(self, run):
        graph = Graph(run)
        return graph, graph.results


class Attention(TorchAttnBackend):
    """Captures decodes: it plans them as they are replayed, by lengths on the device."""

    page_table = torch.zeros(4, 16, dtype=torch.int32)
    prepared = 0

    @property
    def decodes(self):
        return self

    def get_cuda_graph_seq_len_fill_value(self):
        return 1

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        assert (max_bs, max_num_tokens) == (4, 4)

    def init_forward_metadata_capture_cuda_graph(self, *batch):
        pass

    def init_forward_metadata_replay_cuda_graph(self, *batch):
        self.prepared += 1

    def forward(self, inputs):
        batch, count = inputs.batch, inputs.batch.num_tokens
        if batch.forward_mode.is_decode():
            batch = replace(batch, seq_lens_cpu=batch.seq_lens.clamp(min=1), common_attn_metadata=None)
        self.init_forward_metadata(batch)
        parts = {name: getattr(inputs, name)[:count] for name in ("q", "k", "v", "out")}
        super().forward(replace(inputs, batch=batch, **parts))


@pytest.fixture
def played(monkeypatch):
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **rest: zeros(*size, **rest))
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=list, synchronize=list))
    monkeypatch.setattr(graph_runner, "GraphCapturer", Capturer)
    monkeypatch.setattr(graph_runner, "ProgramExecutor", Model)
    for module in (decodes, decode_loop):
        monkeypatch.setattr(module, "WeakTensor", lambda tensor: SimpleNamespace(tensor=lambda: tensor))


@pytest.mark.parametrize("sample_in_graph", [True, False])
def test_decodes_and_pieces_that_are_replayed_give_the_models_tokens(played, sample_in_graph):
    runner = make_runner(Model())
    sizes = {"decode_requests": (1, 2, 4), "piecewise_tokens": (8, 16)}
    graphs = CudaGraphSection(mode="full_and_piecewise", sample_in_graph=sample_in_graph, **sizes)
    runner.config = replace(runner.config, cudagraph=graphs)
    runner.model = replace(runner.model, decode_loop=DecodeLoopPieces(lambda of: begin_decode(of, 4), end_decode))
    runner.attn_backend.__class__ = Attention
    runner.graph_runner = graph_runner.GraphRunner(runner, dispatcher_of(runner))
    runner.graph_runner.capture()
    captured = [(figure.kind, figure.num_tokens) for figure in runner.graph_runner.figures]
    assert captured == [(GraphKind.PIECEWISE, 16), (GraphKind.PIECEWISE, 8)] + [
        (GraphKind.DECODE, size) for size in (4, 2, 1)
    ]
    prompts = [[3, 9, 27], [1, 2], [7] * 11]
    loop = Loop(runner)
    requests = [loop.add(prompt, max_tokens=5 + index) for index, prompt in enumerate(prompts)]
    with torch.inference_mode():
        loop.run()
    expected = [Model().greedy(prompt, 5 + index) for index, prompt in enumerate(prompts)]
    assert [request.output_token_ids for request in requests] == expected
    assert runner.forward_pass_id == len(loop.batches)
    assert (runner.attn_backend.prepared == 0) is sample_in_graph, "a decode loop needs no plan"
