"""Attention within segments: against softmax written out, with and without the program's buffer."""

from __future__ import annotations

import itertools

import torch

from mllm_compile.runtime.ops.segments.reference import segment_attention, segment_attention_with_output

BOUNDS = [0, 5, 6, 18]


def test_each_row_sees_its_own_segment_in_both_directions() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(18, heads, 8, generator=generator) for heads in (4, 2, 2))
    out = torch.full((18, 4, 8), float("nan"))
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    segment_attention_with_output(q, k, v, bounds, out, 0.3, "blocks.0.attn", 12)
    expected = torch.empty_like(out)
    for start, end in itertools.pairwise(BOUNDS):
        for head in range(4):
            scores = q[start:end, head] @ k[start:end, head // 2].T * 0.3
            expected[start:end, head] = torch.softmax(scores, -1) @ v[start:end, head // 2]
    assert torch.allclose(out, expected, atol=1e-5)
    assert torch.equal(segment_attention(q, k, v, bounds, 0.3), out)


def test_segments_of_equal_lengths_are_attended_over_together_as_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    bounds = torch.tensor([0, 3, 6, 6, 10, 14, 18], dtype=torch.int32)
    q, k, v = (torch.randn(18, heads, 8, generator=generator) for heads in (4, 2, 2))
    bias = torch.randn(4, 5, generator=generator)
    out, alone = torch.full((18, 4, 8), float("nan")), torch.empty(18, 4, 8)
    segment_attention_with_output(q, k, v, bounds, out, 0.3, "", 4, 1, 2, bias)
    for start, end in itertools.pairwise(bounds.tolist()):
        own = torch.tensor([0, end - start], dtype=torch.int32)
        parts = (x[start:end] for x in (q, k, v))
        segment_attention_with_output(*parts, own, alone[start:end], 0.3, "", 4, 1, 2, bias)
    assert torch.allclose(out, alone, atol=1e-6)
