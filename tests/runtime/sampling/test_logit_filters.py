"""top_k, top_p, min_p: the same tokens stay as with Transformers' warpers, and ties and "off" behave."""

import math

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mllm_compile.runtime.sampling.logit_filters import filter_scores
from tests.runtime.sampling.sampling_cases import random_logits


def kept(scores, *, top_k=None, top_p=None, min_p=None):
    """[S, W] bool with the same filters for every row."""
    rows = scores.shape[0]
    return filter_scores(
        scores.clone(),
        None if top_k is None else torch.full((rows,), top_k),
        None if top_p is None else torch.full((rows,), top_p),
        None if min_p is None else torch.full((rows,), math.log(min_p) if min_p else -math.inf),
    ).isfinite()


@pytest.mark.parametrize("top_k", [1, 2, 50, 299, 300, 10_000])
def test_top_k_keeps_what_transformers_keeps(top_k):
    scores = random_logits(20)
    assert torch.equal(kept(scores, top_k=top_k), TopKLogitsWarper(top_k)(None, scores).isfinite())


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_what_transformers_keeps(top_p):
    scores = random_logits(20)
    assert torch.equal(kept(scores, top_p=top_p), TopPLogitsWarper(top_p)(None, scores).isfinite())


@pytest.mark.parametrize("min_p", [1e-6, 0.05, 0.5, 0.99, 1.0])
def test_min_p_keeps_what_transformers_keeps(min_p):
    scores = random_logits(20)
    assert torch.equal(kept(scores, min_p=min_p), MinPLogitsWarper(min_p)(None, scores).isfinite())


def test_all_three_together_keep_what_transformers_keeps():
    scores = random_logits(50, spread=3)
    expected = scores
    for warper in (TopKLogitsWarper(20), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)):
        expected = warper(None, expected)
    assert torch.equal(kept(scores, top_k=20, top_p=0.9, min_p=0.05), expected.isfinite())


def test_tokens_that_tie_with_the_last_one_kept_are_kept():
    scores = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0]])
    assert kept(scores, top_k=2).tolist() == [[True, True, True, True, False]]
    assert kept(scores, top_p=0.6).tolist() == [[True, True, True, True, False]]


def test_a_row_with_its_filters_off_is_left_bit_for_bit_alone_among_rows_that_have_them():
    scores = random_logits(2, spread=20)
    filtered = filter_scores(
        scores.clone(), torch.tensor([0, 5]), torch.tensor([1.0, 0.5]), torch.tensor([-math.inf, math.log(0.1)])
    )
    assert torch.equal(filtered[0], scores[0])
    assert filtered[1].isfinite().sum() <= 5


def test_masked_tokens_stay_masked():
    scores = random_logits(3)
    scores[:, 100:] = -math.inf
    assert not kept(scores, top_k=200, top_p=0.99, min_p=0.0)[:, 100:].any()
