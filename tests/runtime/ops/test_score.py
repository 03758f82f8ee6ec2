"""The Triton kernels of log-probabilities against torch's operations, through Triton's interpreter, on a CPU.

The interpreter knows no bfloat16; tests/gpu/test_sampling_pieces.py has compiled kernels. One test runs this file with
the interpreter (tests/runtime/interpreted.py).
"""

from __future__ import annotations

import pytest
import torch

from tests.runtime.interpreted import interpreted, run_interpreted, starts_the_interpreter
from tests.runtime.sampling.sampling_cases import scored_by_torch


@starts_the_interpreter
def test_kernels_do_what_torchs_operations_do_through_the_interpreter():
    run_interpreted(__file__)


@pytest.fixture
def score(monkeypatch):
    from mllm_compile.runtime.ops.tokens import score as module

    monkeypatch.setattr(module, "wrap_triton", lambda kernel: kernel)
    monkeypatch.setattr(module, "starts_early", lambda: False)
    monkeypatch.setattr(module, "product", lambda a, b: a * b)  # the interpreter has no assembly
    return module.score_tokens


def rows_of(count: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    scores = 6 * torch.randn(count, vocab, generator=generator)
    factors = torch.rand(count, generator=generator) + 0.5
    return scores, factors, torch.randint(-1, vocab, (count,), generator=generator)


@interpreted
@pytest.mark.parametrize("vocab", [7, 33, 4096, 9001])
def test_the_numbers_are_those_of_torch(score, vocab):
    scores, factors, tokens = rows_of(5, vocab)
    scores[1, : vocab // 2] = -torch.inf
    scores[2, vocab - 1] = 90.0
    found, wanted = score(scores, factors, tokens), scored_by_torch([scores, factors, tokens])[0]
    torch.testing.assert_close(found[:3], wanted[:3], rtol=1e-6, atol=3e-6)
    assert torch.equal(found[3], wanted[3])


@interpreted
def test_a_row_that_holds_no_number_has_none(score):
    scores, factors, tokens = rows_of(5, 5000)
    expected = score(scores, factors, tokens)
    scores[0, 4999], scores[2, 17], scores[3] = torch.nan, torch.inf, -torch.inf
    found = score(scores, factors, tokens)
    assert found[:2].isnan().tolist() == [[True, False, True, True, False]] * 2
    assert torch.equal(found[:, [1, 4]], expected[:, [1, 4]])


@interpreted
def test_a_row_has_the_same_bits_among_any_and_in_any_type(score):
    scores, factors, tokens = rows_of(9, 4500)
    scores = scores.half()
    whole = score(scores, factors, tokens)
    assert torch.equal(score(scores.float(), factors, tokens), whole)
    for row in (0, 4, 8):
        part = slice(row, row + 1)
        assert torch.equal(score(scores[part], factors[part], tokens[part]), whole[:, part])
