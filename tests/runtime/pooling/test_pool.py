"""Pooling of packed hidden states."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.runtime.pooling.pool import activated, finished, pool

HIDDEN = torch.arange(24.0).view(6, 4)
STARTS, ENDS = torch.tensor([0, 2]), torch.tensor([2, 5])  # the last row is padding


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("cls", HIDDEN[[0, 2]]),
        ("last", HIDDEN[[1, 4]]),
        ("mean", torch.stack([HIDDEN[0:2].mean(0), HIDDEN[2:5].mean(0)])),
        ("max", torch.stack([HIDDEN[1], HIDDEN[4]])),
        ("mean_sqrt_len", torch.stack([HIDDEN[0:2].sum(0) / 2**0.5, HIDDEN[2:5].sum(0) / 3**0.5])),
    ],
)
def test_each_rule_reads_its_own_rows(rule: str, expected: torch.Tensor) -> None:
    assert torch.equal(pool(HIDDEN, STARTS, ENDS, [rule]), expected)  # type: ignore[list-item]


def test_several_rules_follow_each_other() -> None:
    both = pool(HIDDEN, STARTS, ENDS, ["cls", "last"])
    assert torch.equal(both, torch.cat([HIDDEN[[0, 2]], HIDDEN[[1, 4]]], -1))


def test_a_mean_leaves_a_prompt_out() -> None:
    found = pool(HIDDEN, STARTS, ENDS, ["mean"], torch.tensor([1, 2]))
    assert torch.equal(found, torch.stack([HIDDEN[1], HIDDEN[4]]))


def test_an_embedding_is_cut_before_it_is_normalised() -> None:
    found = finished(torch.tensor([[3.0, 4.0, 12.0]]), 2, normalize=True)
    torch.testing.assert_close(found, torch.tensor([[0.6, 0.8]]))


def test_scores_become_probabilities() -> None:
    scores = torch.tensor([[0.0, 1.0]])
    assert torch.equal(activated(scores, "none"), scores)
    torch.testing.assert_close(activated(scores, "softmax").sum(), torch.tensor(1.0))
    torch.testing.assert_close(activated(scores, "sigmoid"), scores.sigmoid())


def test_means_of_equal_lengths_are_those_of_each() -> None:
    hidden, edges = torch.randn(14, 3), [(0, 2), (2, 4), (4, 6), (8, 10), (10, 13), (13, 14)]
    starts, ends = (torch.tensor(side) for side in zip(*edges, strict=True))
    expected = torch.stack([hidden[start:end].mean(0) for start, end in edges])
    torch.testing.assert_close(pool(hidden, starts, ends, ["mean"]), expected)
