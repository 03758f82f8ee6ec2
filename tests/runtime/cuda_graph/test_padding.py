"""Lengths of padding, and which memory outputs of layers get."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mllm_compile.runtime.cuda_graph.padding import LayerOutputs, prompt_lengths
from mllm_compile.runtime.forward_context import set_forward_context
from mllm_compile.runtime.graph_mode import BatchDescriptor, CUDAGraphMode, GraphKind


@given(num_tokens=st.integers(1, 5000), longest=st.integers(1, 5000))
def test_tokens_that_are_captured_are_as_few_requests_as_may_be_none_too_long(num_tokens, longest):
    lengths = prompt_lengths(num_tokens, longest)
    assert sum(lengths) == num_tokens
    assert all(1 <= length <= longest for length in lengths)
    assert len(lengths) == -(-num_tokens // longest)


@pytest.mark.parametrize("kind", GraphKind)
def test_graphs_that_serve_any_step_share_outputs_that_are_zeros_at_first(kind):
    outputs, like = LayerOutputs(most_tokens=8, num_ranks=1), torch.ones(5, 2)
    context = {"no_compile_layers": {}, "slot_mapping": {}, "num_tokens": 5}
    descriptor = BatchDescriptor(5, kind=kind)
    with set_forward_context(
        {},
        **context,
        cudagraph_runtime_mode=CUDAGraphMode.FULL,
        batch_descriptor=descriptor,
    ):
        one, other = (outputs(0, like, (3,), torch.float32) for _ in range(2))
    assert one.shape == (5, 3)
    assert (one.data_ptr() == other.data_ptr()) is not descriptor.uniform
    if not descriptor.uniform:
        assert not one.any()
