"""Masks as logits feel them: what is forbidden, what keeps its very value, what is no number."""

import numpy as np
import pytest
import torch

from mllm_compile.runtime.sampling.token_masks import TokenMasks

CPU = torch.device("cpu")


def bits_of(allowed):
    """[K, V] bool → [K, W] int32."""
    padded = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)))
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def mask_of(allowed, rows=None):
    masks = TokenMasks(8, allowed.shape[1], CPU)
    bits = masks.begin()
    bits[: len(allowed)] = bits_of(allowed)
    return masks.send(len(allowed), None if rows is None else np.array(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 1000])
def test_allowed_logits_keep_their_bits_and_others_are_minus_infinity(dtype, vocab_size):
    generator = np.random.default_rng(vocab_size)
    allowed = generator.random((3, vocab_size)) < 0.5
    logits = torch.randn(3, vocab_size).to(dtype)
    before = logits.clone()
    masked = mask_of(allowed).forbid_others(logits)
    assert masked.dtype == dtype
    assert torch.equal(masked, before.masked_fill(torch.from_numpy(~allowed), -torch.inf))
    assert torch.equal(logits, before), "they are the step's scores too"


def test_rows_without_a_mask_keep_theirs():
    allowed = np.zeros((2, 40), bool)
    allowed[:, 7] = True
    logits = torch.randn(5, 40)
    masked = mask_of(allowed, rows=[3, 1]).forbid_others(logits)
    assert torch.equal(masked[[0, 2, 4]], logits[[0, 2, 4]])
    assert masked[[1, 3]].argmax(dim=1).tolist() == [7, 7]
    assert (masked[[1, 3]] == -torch.inf).sum() == 78


def test_nan_stays_nan_where_its_token_is_forbidden():
    logits = torch.tensor([[torch.nan, 1.0, torch.inf, 2.0]])
    masked = mask_of(np.array([[False, True, False, True]])).forbid_others(logits)
    assert masked.isnan().tolist() == [[True, False, True, False]]


def test_a_mask_of_all_tokens_changes_nothing():
    logits = torch.randn(2, 100).bfloat16()
    assert torch.equal(mask_of(np.ones((2, 100), bool)).forbid_others(logits), logits)
