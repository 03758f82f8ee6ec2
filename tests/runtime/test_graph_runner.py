"""What a capture runs, as far as it can be seen without a GPU (tests/gpu/test_cuda_graphs.py has the rest)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mllm_compile.runtime.cuda_graph.graph_runner import _lengths


@given(num_tokens=st.integers(1, 5000), longest=st.integers(1, 5000))
def test_tokens_that_are_captured_are_as_few_requests_as_may_be_none_too_long(num_tokens, longest):
    lengths = _lengths(num_tokens, longest)
    assert sum(lengths) == num_tokens
    assert all(1 <= length <= longest for length in lengths)
    assert len(lengths) == -(-num_tokens // longest)
