"""Graphs that are played on a CPU: a capture is a function that a replay runs again."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mllm_compile.check import verify_reference
from mllm_compile.runtime.attention.torch_backend import TorchAttnBackend
from mllm_compile.runtime.config_sections import CudaGraphSection, SpeculativeSection
from mllm_compile.runtime.cuda_graph import decode_loop, decodes, graph_runner, verifies
from mllm_compile.runtime.cuda_graph.kinds import dispatcher_of
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.program.loaded import DecodeLoopPieces, VerifyPieces
from mllm_compile.runtime.state.hybrid_backend import HybridAttnBackend
from tests.runtime.runner_cases import TinyModel, make_runner
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
        for place, value in zip(self.results or (), self._run() or (), strict=True):
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

    page_table = torch.zeros(64, 64, dtype=torch.int32)
    prepared = 0

    @property
    def decodes(self):
        return self

    @property
    def verifies(self):
        return self

    def get_cuda_graph_seq_len_fill_value(self):
        return 1

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        assert max_bs == max_num_tokens

    def init_forward_metadata_capture_cuda_graph(self, *batch):
        pass

    def init_forward_metadata_capture_verify(self, *batch):
        pass

    def begin_captured_verify(self, *batch):
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


class Hybrid(HybridAttnBackend):
    """Leaves attention to the one above."""

    def forward(self, inputs):
        self._of_attention.forward(inputs)

    def forward_state(self, inputs):
        if not inputs.metadata.num_held_tokens:
            self._mixed_step = None  # a decode's capture read none
        super().forward_state(inputs)


def play_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets graphs be captured and replayed on a CPU."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **rest: zeros(*size, **rest))
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=list, synchronize=list))
    monkeypatch.setattr(graph_runner, "GraphCapturer", Capturer)
    monkeypatch.setattr(graph_runner, "ProgramExecutor", Model)
    for module in (decodes, decode_loop, verifies):
        monkeypatch.setattr(module, "WeakTensor", lambda tensor: SimpleNamespace(tensor=lambda: tensor))


def played_runner(
    model: Model | None = None,
    section: SpeculativeSection | None = None,
    decode_requests: tuple[int, ...] = (1, 2, 4, 8),
    sample_in_graph: bool = True,
    piecewise_tokens: tuple[int, ...] = (8, 16),
    **options,
) -> ModelRunner:
    """A runner with captured decodes and pieces, and verify steps if it is to speculate; within `played`."""
    runner = make_runner(model or Model(), **options)
    runner.config = replace(runner.config, speculative=section or SpeculativeSection())
    capture_on_cpu(runner, decode_requests, sample_in_graph, piecewise_tokens)
    return runner


def capture_on_cpu(
    runner: ModelRunner,
    decode_requests: tuple[int, ...],
    sample_in_graph: bool = True,
    piecewise_tokens: tuple[int, ...] = (8, 16),
) -> None:
    """Captures steps of a runner that has none; within `played`."""
    sizes = {"decode_requests": decode_requests, "piecewise_tokens": piecewise_tokens}
    graphs = CudaGraphSection(mode="full_and_piecewise", sample_in_graph=sample_in_graph, **sizes)
    runner.config = replace(runner.config, cudagraph=graphs)
    page_size = runner.config.runtime.page_size
    runner.model = replace(
        runner.model,
        decode_loop=DecodeLoopPieces(lambda of: begin_decode(of, page_size), end_decode),
        verify=VerifyPieces(lambda of: verify_reference.begin_verify(of, page_size), verify_reference.end_verify),
    )
    runner.init_attention_backend()  # of the new config
    backend = runner.attn_backend
    if isinstance(backend, HybridAttnBackend):
        backend.__class__, backend = Hybrid, backend._attention
    if backend is not None:
        backend.__class__ = Attention
    runner.graph_runner = graph_runner.GraphRunner(runner, dispatcher_of(runner))
    runner.graph_runner.capture()
