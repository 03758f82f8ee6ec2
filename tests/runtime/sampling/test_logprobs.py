"""Log-probabilities against log_softmax, and chunking."""

import pytest
import torch

from mllm_compile.runtime.sampling import logprobs
from mllm_compile.runtime.sampling.logprobs import token_logprobs


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 50, generator=generator) * 4
    return logits, torch.randint(50, (7,), generator=generator)


def test_logprobs_are_log_softmax_of_the_logits(case):
    logits, token_ids = case
    expected = logits.log_softmax(-1)
    result = token_logprobs(logits, token_ids, 5)
    torch.testing.assert_close(result.logprobs, expected.gather(1, token_ids[:, None]).squeeze(1))
    torch.testing.assert_close(result.top_logprobs, expected.topk(5).values)
    assert torch.equal(result.top_token_ids, expected.topk(5).indices)


def test_the_rank_is_the_tokens_place_among_all(case):
    logits, token_ids = case
    place = logits.argsort(-1, descending=True).argsort(-1).gather(1, token_ids[:, None]).squeeze(1) + 1
    assert torch.equal(token_logprobs(logits, token_ids, 0).ranks, place)
    assert token_logprobs(logits, logits.argmax(-1), 0).ranks.tolist() == [1] * 7


def test_no_alternatives_are_no_columns(case):
    result = token_logprobs(*case, 0)
    assert result.top_token_ids.shape == result.top_logprobs.shape == (7, 0)


def test_chunks_of_rows_give_what_all_rows_at_once_give(case, monkeypatch):
    whole = token_logprobs(*case, 3)
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", 2 * 50)
    chunked = token_logprobs(*case, 3)
    for name in ("logprobs", "ranks", "top_token_ids", "top_logprobs"):
        torch.testing.assert_close(getattr(chunked, name), getattr(whole, name))


def test_bfloat16_logits_are_worked_on_in_float32(case):
    logits, token_ids = case[0].bfloat16(), case[1]
    result = token_logprobs(logits, token_ids, 2)
    assert result.logprobs.dtype == result.top_logprobs.dtype == torch.float32
    torch.testing.assert_close(result.logprobs, token_logprobs(logits.float(), token_ids, 2).logprobs)
