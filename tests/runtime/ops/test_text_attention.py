"""The Triton kernel of packed texts' attention against torch's operations, through Triton's interpreter, on a CPU.

One test runs this file with the interpreter (tests/runtime/interpreted.py).
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from mllm_compile.runtime.ops.segments.reference import segment_attention_with_output
from tests.runtime.interpreted import interpreted, run_interpreted, starts_the_interpreter, take_loop_bounds

# Texts that share a block, that begin within one, that are longer than several, and padding behind them.
LENGTHS = (3, 40, 150, 1, 64, 6)
PADDING = 5


@starts_the_interpreter
def test_the_kernel_does_what_torchs_operations_do_through_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.fixture
def texts(monkeypatch):
    from mllm_compile.runtime.ops.segments import texts

    monkeypatch.setattr(texts, "wrap_triton", lambda kernel: kernel)
    take_loop_bounds(monkeypatch)
    return texts


@interpreted
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "left", "right", "far", "cap"),
    [
        (2, 2, 64, -1, -1, 0, 0.0),
        (4, 2, 32, -1, 0, 0, 0.0),
        (2, 1, 48, 7, 7, 0, 0.0),
        (2, 2, 16, 5, 0, 0, 0.0),
        (2, 2, 32, -1, -1, 20, 0.0),
        (2, 1, 32, -1, -1, 0, 0.7),
        (2, 2, 80, 70, 3, 20, 0.7),
    ],
    ids=["full", "causal and shared keys", "window", "causal window", "bias", "capped with sinks", "all"],
)
def test_each_way_of_seeing_is_the_reference(texts, heads, kv_heads, head_dim, left, right, far, cap) -> None:
    torch.manual_seed(0)
    bounds = np.array([0, *itertools.accumulate(LENGTHS)])
    count = int(bounds[-1])
    packed = torch.randn(count + PADDING, heads + 2 * kv_heads, head_dim)
    q, k, v = packed.split((heads, kv_heads, kv_heads), 1)
    bias = torch.randn(heads, 2 * far + 1) if far else None
    sinks = torch.randn(heads) if cap else None
    padding = np.arange(count, count + PADDING)
    starts, ends = (
        torch.from_numpy(np.concatenate([np.repeat(edge, LENGTHS), of_padding]))
        for edge, of_padding in ((bounds[:-1], padding), (bounds[1:], padding + 1))
    )
    out = torch.full((count + PADDING, heads, head_dim), float("nan"))
    texts.text_attention(q, k, v, starts, ends, bias, None, None, None, sinks, out, 0.2, left, right, cap)
    expected = torch.empty(count, heads, head_dim)
    own = torch.from_numpy(bounds).int()
    seen: dict = {"window_left": left, "window_right": right, "bias": bias, "soft_cap": cap, "sinks": sinks}
    segment_attention_with_output(q[:count], k[:count], v[:count], own, expected, 0.2, "", **seen)
    assert (out[:count] - expected).abs().max() < 1e-5
    if sinks is not None:
        return  # rows of padding see their own too
    assert (out[count:] - v[count:].repeat_interleave(heads // kv_heads, 1)).abs().max() < 1e-5


@interpreted
@pytest.mark.parametrize(("has_keys", "has_queries"), [(True, True), (True, False), (False, True)])
def test_scores_with_columns_of_distances_are_the_references(texts, has_keys, has_queries) -> None:
    torch.manual_seed(0)
    bounds = np.array([0, *itertools.accumulate(LENGTHS)])
    q, k, v = torch.randn(3, int(bounds[-1]), 2, 32)
    keys, queries = (torch.randn(12, 2, 32) if has else None for has in (has_keys, has_queries))
    columns = torch.randint(12, (2 * 30 + 1,))
    starts, ends = (torch.from_numpy(np.repeat(edge, LENGTHS)) for edge in (bounds[:-1], bounds[1:]))
    out, expected = torch.full_like(q, float("nan")), torch.empty_like(q)
    texts.text_attention(q, k, v, starts, ends, None, keys, queries, columns, None, out, 0.2, -1, -1, 0.0)
    own = torch.from_numpy(bounds).int()
    segment_attention_with_output(q, k, v, own, expected, 0.2, "", 0, -1, -1, None, keys, queries, columns)
    assert (out - expected).abs().max() < 1e-5
