"""What a capture runs, as far as it can be seen without a GPU (tests/gpu/test_cuda_graphs.py has the rest)."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mllm_compile.runtime.config_sections import CudaGraphSection
from mllm_compile.runtime.cuda_graph.graph_runner import GraphRunner, _lengths
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
