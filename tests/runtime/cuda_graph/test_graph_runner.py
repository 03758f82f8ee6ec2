"""What a capture runs, as far as it can be seen without a GPU (tests/gpu/test_cuda_graphs.py has the rest)."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mllm_compile.runtime.attention.torch_backend import TorchAttnBackend
from mllm_compile.runtime.config_sections import CudaGraphSection
from mllm_compile.runtime.cuda_graph import graph_runner
from mllm_compile.runtime.cuda_graph.dispatcher import GraphDispatcher
from mllm_compile.runtime.cuda_graph.graph_runner import GraphRunner, _lengths
from mllm_compile.runtime.errors import ConfigError
from mllm_compile.runtime.forward_batch import ForwardMode
from mllm_compile.runtime.graph_mode import CUDAGraphMode
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
        attn_backend=SimpleNamespace(page_table=None),
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
    with pytest.raises(NotImplementedError, match="TorchAttnBackend does not run inside CUDA graphs"):
        GraphRunner(runner, GraphDispatcher(CUDAGraphMode.FULL, (), (8,)))
