"""Log-probabilities against log_softmax, chunking, and kernels of a program."""

from types import SimpleNamespace

import pytest
import torch

from mllm_compile.runtime.sampling import logprobs
from mllm_compile.runtime.sampling.logprobs import all_logprobs, token_logprobs
from tests.runtime.sampling.sampling_cases import scored_by_torch


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


PIECES = SimpleNamespace(dtype=torch.bfloat16, score=scored_by_torch, score_floats=scored_by_torch)


@pytest.mark.parametrize("num_top", [0, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_of_a_program_give_what_torch_gives(case, num_top, dtype):
    logits, token_ids = case[0].to(dtype), case[1].clone()
    token_ids[2], factors = -1, torch.linspace(0.5, 2.0, 7)
    for one in (factors, None):
        ours, theirs = (token_logprobs(logits, token_ids, num_top, one, pieces) for pieces in (PIECES, None))
        for name in ("logprobs", "ranks", "top_token_ids", "top_logprobs"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))
        torch.testing.assert_close(all_logprobs(logits, one, PIECES), all_logprobs(logits, one))
        whole = all_logprobs(logits, one, PIECES)
        assert torch.equal(whole.gather(1, ours.top_token_ids), ours.top_logprobs)


def test_a_row_that_holds_no_number_has_no_log_probabilities_by_kernels_either(case):
    logits, token_ids = case
    logits[1, 4], logits[3, 0], logits[5] = torch.nan, torch.inf, -torch.inf
    found = token_logprobs(logits, token_ids, 2, None, PIECES)
    for values in (found.logprobs[:, None], found.top_logprobs, all_logprobs(logits, None, PIECES)):
        assert values.isnan().all(-1).tolist() == values.isnan().any(-1).tolist() == [i in (1, 3, 5) for i in range(7)]
