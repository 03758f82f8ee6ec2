"""What a capture runs, as far as it can be seen without a GPU (tests/gpu/test_cuda_graphs.py has the rest)."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mllm_compile.runtime.attention.torch_backend import TorchAttnBackend
from mllm_compile.runtime.collectives.base import using
from mllm_compile.runtime.config_sections import CudaGraphSection
from mllm_compile.runtime.cuda_graph import graph_runner
from mllm_compile.runtime.cuda_graph.dispatcher import GraphDispatcher
from mllm_compile.runtime.cuda_graph.graph_runner import GraphRunner, _lengths
from mllm_compile.runtime.errors import ConfigError
from mllm_compile.runtime.forward_batch import ForwardMode
from mllm_compile.runtime.graph_mode import BatchDescriptor, CUDAGraphMode
from mllm_compile.runtime.runner_config import RunnerConfig
from tests.runtime.runner_cases import DEFAULTS


@given(num_tokens=st.integers(1, 5000), longest=st.integers(1, 5000))
def test_tokens_that_are_captured_are_as_few_requests_as_may_be_none_too_long(num_tokens, longest):
    lengths = _lengths(num_tokens, longest)
    assert sum(lengths) == num_tokens
    assert all(1 <= length <= longest for length in lengths)
    assert len(lengths) == -(-num_tokens // longest)


@pytest.mark.parametrize(
    ("asked", "deterministic", "sizes", "pieces", "said"),
    [
        (False, False, (1, 2), "pieces", ""),
        (True, True, (1, 2), "pieces", ""),
        (True, False, (), "pieces", ""),
        (True, False, (1, 2), None, "no kernels that choose tokens"),
        (True, False, (1, 2), "pieces", "no kernels that attend in every layer"),
    ],
)
def test_decodes_choose_no_tokens_where_they_are_not_to_or_kernels_lack(
    asked, deterministic, sizes, pieces, said, caplog
):
    graphs = object.__new__(GraphRunner)
    graphs.dispatcher = SimpleNamespace(decode_requests=sizes)
    graphs._runner = SimpleNamespace(
        config=RunnerConfig(
            dtype=torch.float32,
            runtime=replace(DEFAULTS, deterministic=deterministic),
            cudagraph=CudaGraphSection(mode="full", sample_in_graph=asked),
        ),
        model=SimpleNamespace(decode_loop=pieces),
        attn_backend=SimpleNamespace(decodes=SimpleNamespace(page_table=None)),
    )
    with caplog.at_level(logging.INFO, logger="mllm_compile"):
        assert graphs._make_decode_loop() is None
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)


@pytest.mark.parametrize(
    ("mode", "shared", "runs"),
    [
        (CUDAGraphMode.FULL_AND_PIECEWISE, 0, "whole"),
        (CUDAGraphMode.FULL_AND_PIECEWISE, 64, "pieces of 8"),
        (CUDAGraphMode.FULL_DECODE_ONLY, 64, None),
    ],
)
def test_a_decode_that_reads_a_prefix_once_is_not_the_captured_one(monkeypatch, mode, shared, runs):
    graphs = object.__new__(GraphRunner)
    graphs.dispatcher = GraphDispatcher(mode, (8,), (8,))
    monkeypatch.setattr(GraphRunner, "_places", lambda self, size: SimpleNamespace(take_tokens=lambda *batch: None))
    monkeypatch.setattr(GraphRunner, "_run_pieces", lambda self, batch, size: f"pieces of {size.num_tokens}")
    monkeypatch.setattr(GraphRunner, "_replay_decode", lambda self, batch, size: "whole")
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE, num_tokens=5, batch_size=5, common_prefix_len=shared, dp_metadata=None
    )
    ran = graphs.run(batch)
    assert getattr(ran, "next_token_logits", ran) == runs


def test_attention_that_knows_of_no_graphs_stands_between_captured_pieces(monkeypatch):
    for needs_a_gpu in ("GraphCapturer", "StepInputs"):
        monkeypatch.setattr(graph_runner, needs_a_gpu, lambda *args: None)
    runner = SimpleNamespace(
        attn_backend=TorchAttnBackend(),
        device="cpu",
        config=SimpleNamespace(max_rows=2),
        model=SimpleNamespace(executor=None),
        num_deals=1,
        always_takes_features=False,
    )
    with pytest.raises(ConfigError, match="need a compiled program"):  # it came as far as the program
        GraphRunner(runner, GraphDispatcher(CUDAGraphMode.PIECEWISE, (8,), ()))
    with pytest.raises(RuntimeError, match="does not capture such steps"):
        GraphRunner(runner, GraphDispatcher(CUDAGraphMode.FULL, (), (8,)))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_captured_decode_has_a_ranks_own_requests_first_and_tells_padding_as_tokens_are_gathered(monkeypatch, rank):
    """Of three ranks with two, no and one requests, captured for two each."""
    rows, slots = np.array([1, 2, 0, 0, 7, 0]), np.array([40, 41, 0, 0, 50, 0])
    written = {}

    def write(rows, seq_lens, slots, size, padding_len, deltas):
        written.update(rows=rows.tolist(), size=size)
        graphs.inputs.out_cache_loc[:] = torch.from_numpy(slots)  # as the decode's first kernel does

    graphs = object.__new__(GraphRunner)
    graphs._num_deals, graphs._max_requests = 3, 2
    graphs.dispatcher = GraphDispatcher(CUDAGraphMode.FULL_DECODE_ONLY, (), (1, 2))
    places = torch.zeros(6, dtype=torch.int64)
    graphs.inputs = SimpleNamespace(
        out_cache_loc=places, req_pool_indices=places, seq_lens=places, padding_len=1, clear_rope_lens=lambda: None
    )
    graphs.decode_loop = SimpleNamespace(next_turn=lambda: SimpleNamespace(write=write))
    graphs._chosen_tokens = {BatchDescriptor(2, num_reqs=2, uniform=True): torch.zeros(6, dtype=torch.int64)}
    monkeypatch.setattr(GraphRunner, "_replay", lambda self, size: SimpleNamespace(logits=torch.zeros(6, 5)))
    with using(SimpleNamespace(rank=rank)):
        assert graphs.decode_size(2) == (2, 1)
        graphs.decode(rows, np.ones(6, dtype=np.int64), slots)
        of_all = graphs._slots_of_all(2)
    own = slice(2 * rank, 2 * rank + 2)
    assert (written["rows"][:2], written["size"]) == (rows[own].tolist(), 6)
    assert of_all.tolist() == slots.tolist()
