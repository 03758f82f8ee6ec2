"""Graphs that are played on a CPU: a capture is a function that a replay runs again."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mllm_compile.check import verify_reference
from mllm_compile.runtime.attention.metadata import StepPrompts
from mllm_compile.runtime.attention.torch_backend import TorchAttnBackend
from mllm_compile.runtime.config_sections import CudaGraphSection, SpeculativeSection
from mllm_compile.runtime.cuda_graph import decode_loop, decodes, graph_runner, kind, prompt_slots, verifies
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

    def map_body(self, body, change):
        return body


class Graph:
    """Runs what was captured again, into the places of the first results."""

    def __init__(self, run):
        self._run, self.results = run, run()

    def replay(self):
        results = self._run()
        for place, value in () if results is None else zip(self.results, results, strict=True):
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
    """Captures decodes, and prompts alone: it plans them as they are replayed, decodes by lengths on the device.

    `shared` has the shared tokens of each cascade.
    """

    page_table = torch.zeros(64, 64, dtype=torch.int32)
    prepared = 0
    step: StepPrompts | None = None  # of the next replay
    shared: tuple[int, ...] = ()

    @property
    def prompts(self):
        return self

    @property
    def captured_cascades(self):
        return self

    def cascade_pays(self, num_requests, num_tokens, is_captured=False):
        return num_requests > 1 and num_tokens > 0

    def use_cascade(self):
        pass

    def share_prefix(self, num_tokens):
        self.shared = (*self.shared, num_tokens)

    def prompt_work_bytes(self, has_prefix):
        return 16

    def init_forward_metadata_capture_prompts(self, *step):
        pass

    def write_prompt_work(self, num_tokens, work, prompts):
        self.step = prompts
        return True

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
        batch = inputs.batch
        if batch.forward_mode.is_decode():
            batch = replace(batch, seq_lens_cpu=batch.seq_lens.clamp(min=1), common_attn_metadata=None)
        elif self.step is not None and not batch.req_pool_indices.any():
            batch = self._with_prompts(batch, self.step)
        count = batch.num_tokens
        self.init_forward_metadata(batch)
        parts = {name: getattr(inputs, name)[:count] for name in ("q", "k", "v", "out")}
        super().forward(replace(inputs, batch=batch, **parts))

    def _with_prompts(self, batch, step):
        """The captured batch with a step's prompts in the place of padding; no table has their pages yet."""
        ids, size = step.list_pages(), batch.token_to_kv_pool.page_size
        for row, num_keys in zip(step.rows.tolist(), step.num_keys.tolist(), strict=True):
            slots, ids = (
                (ids[: -(-num_keys // size), None] * size + np.arange(size)).ravel(),
                ids[-(-num_keys // size) :],
            )
            batch.req_to_token_pool.req_to_token[row, : slots.size] = torch.from_numpy(slots.astype(np.int32))
        lens = {"extend_seq_lens": step.query_lens, "extend_prefix_lens": step.prefix_lens, "seq_lens": step.num_keys}
        of_host = {name: torch.from_numpy(values.astype(np.int32)) for name, values in lens.items()}
        tokens = {name: getattr(batch, name)[: step.starts[-1]] for name in ("input_ids", "positions", "out_cache_loc")}
        rows, of_cpu = torch.from_numpy(step.rows), {f"{name}_cpu": values for name, values in of_host.items()}
        sizes = {"batch_size": len(rows), "req_pool_indices": rows.long(), "common_attn_metadata": None}
        return replace(batch, **sizes, **tokens, **of_host, **of_cpu)


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
    for module in (decodes, decode_loop, verifies, kind, prompt_slots):
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
    whole_prompts: bool = False,
) -> None:
    """Captures steps of a runner that has none; within `played`."""
    sizes = {"decode_requests": decode_requests, "piecewise_tokens": piecewise_tokens, "whole_prompts": whole_prompts}
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
