"""Attention within segments: against softmax written out, with and without the program's buffer."""

from __future__ import annotations

import itertools

import pytest
import torch

from mllm_compile.runtime.ops.segments import reference
from mllm_compile.runtime.ops.segments.reference import segment_attention, segment_attention_with_output

BOUNDS = [0, 5, 6, 18]
COLUMNS = 6


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


def test_scores_are_capped_ahead_of_a_bias_and_within_windows() -> None:
    torch.manual_seed(0)
    q, k, v = (3 * torch.randn(18, heads, 8) for heads in (4, 2, 2))
    bias, cap = torch.randn(4, 2 * 20 + 1), 1.5
    out = segment_attention(q, k, v, torch.tensor(BOUNDS), 0.3, "", 4, 1, bias, None, None, None, None, cap)
    for (start, end), head in itertools.product(itertools.pairwise(BOUNDS), range(4)):
        far = torch.arange(end - start) - torch.arange(end - start)[:, None]
        scores = cap * torch.tanh(q[start:end, head] @ k[start:end, head // 2].T * 0.3 / cap) + bias[head, far + 20]
        scores = scores.masked_fill((far < -4) | (far > 1), float("-inf"))
        assert torch.allclose(out[start:end, head], scores.softmax(-1) @ v[start:end, head // 2], atol=1e-5)


def test_sinks_take_their_part_of_the_softmax() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(18, heads, 8) for heads in (4, 2, 2))
    sinks = torch.randn(4)
    out = segment_attention(q, k, v, torch.tensor(BOUNDS), 0.3, "", -1, -1, None, None, None, None, sinks)
    for (start, end), head in itertools.product(itertools.pairwise(BOUNDS), range(4)):
        weights = (q[start:end, head] @ k[start:end, head // 2].T * 0.3).exp()
        weights /= weights.sum(-1, keepdim=True) + sinks[head].exp()
        assert torch.allclose(out[start:end, head], weights @ v[start:end, head // 2], atol=1e-5)


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


@pytest.mark.parametrize(("has_keys", "has_queries"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("most_scores", [1 << 24, 200])
def test_scores_with_columns_of_distances_are_added(
    has_keys: bool, has_queries: bool, most_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_MOST_SCORES", most_scores)
    torch.manual_seed(0)
    bounds = [0, 3, 6, 9, 10, 22]
    q, k, v = torch.randn(3, bounds[-1], 2, 8)
    keys = torch.randn(COLUMNS, 2, 8) if has_keys else None
    queries = torch.randn(COLUMNS, 2, 8) if has_queries else None
    columns = torch.randint(COLUMNS, (9,))  # up to four tokens are told apart
    out = segment_attention(q, k, v, torch.tensor(bounds), 0.3, "", 7, 5, None, keys, queries, columns)
    for (start, end), head in itertools.product(itertools.pairwise(bounds), range(2)):
        scores = torch.full((end - start, end - start), float("-inf"))
        for i, j in itertools.product(range(start, end), repeat=2):
            if -7 <= j - i <= 5:
                column = columns[max(-4, min(4, j - i)) + 4]
                score = q[i, head] @ k[j, head]
                score += 0 if keys is None else q[i, head] @ keys[column, head]
                score += 0 if queries is None else queries[column, head] @ k[j, head]
                scores[i - start, j - start] = score * 0.3
        expected = scores.softmax(-1) @ v[start:end, head]
        assert torch.allclose(out[start:end, head], expected, atol=1e-5)
