"""Accepted are the tokens that were chosen too. Draws with drafts have the distribution of draws without."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.runtime.sampling.acceptance import accept, accept_synthetically
from mllm_compile.runtime.sampling.counter_rng import draw_tokens, padded_scores
from mllm_compile.runtime.sampling.params import NO_TOKEN, NONE_ALLOWED

NO = NO_TOKEN


def test_the_longest_beginning_that_was_chosen_is_accepted():
    choices = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 9, 3, 4], [1, 2, 2, 2], [7, 7, 7, 7]])
    drafts = torch.tensor([[1, 2, 3], [5, 2, 3], [1, 2, 3], [1, NO, NO], [NO, NO, NO]])
    accepted = accept(choices, drafts)
    assert accepted.counts.tolist() == [4, 1, 2, 2, 1]
    assert accepted.newest.tolist() == [4, 1, 9, 2, 7]
    assert not accepted.broken_drafts.any()


def test_rows_without_a_token_end_a_run_and_are_told_of_drafts_alone():
    choices = torch.tensor([[1, NO, 3], [NO, 2, 3], [1, NONE_ALLOWED, 3], [NO, NO, NO]])
    drafts = torch.tensor([[1, 2], [1, 2], [1, 2], [NO, NO]])
    accepted = accept(choices, drafts)
    assert accepted.counts.tolist() == [2, 1, 2, 1]
    assert accepted.broken_drafts.tolist() == [True, True, False, False]


@pytest.mark.parametrize("length", [1.0, 1.6, 2.5, 4.0])
def test_a_synthetic_acceptance_has_its_mean(length):
    count = 20_000
    choices, drafts = torch.full((count, 4), 7), torch.tensor([[1, 2, 3]]).expand(count, 3)
    accepted = accept_synthetically(choices, drafts, length, torch.arange(count), torch.arange(count) % 50)
    assert accepted.counts.float().mean().item() == pytest.approx(length, abs=0.02)
    for row, num in zip(accepted.token_ids[:50].tolist(), accepted.counts[:50].tolist(), strict=True):
        assert row[:num] == [*[1, 2, 3][: num - 1], 7]


def test_a_synthetic_acceptance_takes_no_more_than_was_drafted():
    choices, drafts = torch.full((3, 4), 7), torch.tensor([[1, 2, NO], [NO, NO, NO], [1, 2, 3]])
    assert accept_synthetically(choices, drafts, 4.0, torch.arange(3), torch.arange(3)).counts.tolist() == [3, 1, 4]


DRAFTING = ("always the likeliest", "always a rare one", "drawn by its own noise")


@pytest.mark.parametrize(
    ("drafting", "count"),
    [(DRAFTING[2], 4_000), *(pytest.param(one, 100_000, marks=pytest.mark.slow) for one in DRAFTING)],
)
def test_draws_with_drafts_have_the_distribution_of_the_model(drafting, count):
    """Chi-square of the tokens of 3 drafted positions over a vocabulary of 16, each position by itself."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 16, generator=generator) * 1.5
    probabilities = logits.softmax(-1)
    seeds = torch.arange(count) * 7919 + 5
    choices = torch.stack([_draws(logits[j], seeds, 100 + j) for j in range(4)], dim=1)
    if drafting == "always the likeliest":
        drafts = probabilities[:3].argmax(-1).expand(count, 3)
    elif drafting == "always a rare one":
        drafts = probabilities[:3].argmin(-1).expand(count, 3)
    else:
        drafts = torch.stack([_draws(logits[j], seeds + 1_000_003, 100 + j) for j in range(3)], dim=1)
    accepted = accept(choices, drafts)
    for place in range(4):
        tokens = accepted.token_ids[accepted.counts > place, place]
        if len(tokens) > 500:
            expected = probabilities[place] * len(tokens)
            if place + 1 < 4 and drafting != "drawn by its own noise":
                assert (tokens == drafts[0, place]).any()
            chi_square = ((torch.bincount(tokens, minlength=16) - expected) ** 2 / expected).sum().item()
            assert chi_square < 44.3, f"place {place}: 15 degrees of freedom exceed this once in 10^4"


def _draws(logits: torch.Tensor, seeds: torch.Tensor, position: int) -> torch.Tensor:
    scores = padded_scores(logits.expand(len(seeds), -1), torch.ones(len(seeds)))
    return draw_tokens(scores, seeds, torch.full_like(seeds, position))
