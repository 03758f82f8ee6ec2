"""Helpers of the sampler's tests: steps over fixed logits, and a chi-square test."""

from __future__ import annotations

import torch

from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.sampling.sampler import Sampler, SamplerOutput
from mllm_compile.runtime.sampling.state import SamplingState

VOCAB = 300  # two blocks of the draw, the second not full
PROMPT = (3, 4, 4, 5)


def random_logits(num_rows: int, *, seed: int = 0, spread: float = 2.0, vocab_size: int = VOCAB) -> torch.Tensor:
    """[num_rows, vocab_size] float32 with no ties to speak of."""
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def make_state(
    *params: SamplingParams, device: str = "cpu", vocab_size: int = VOCAB, first_row: int = 1, stop_ids: tuple = ()
) -> SamplingState:
    """A state with one request a row from first_row on; request i has seed 1000 + i unless it brings one."""
    state = SamplingState(first_row + len(params) + 2, vocab_size, device)
    for i, one in enumerate(params):
        state.set_request(first_row + i, one, PROMPT, 1000 + i, stop_ids=stop_ids)
    return state


def sample(state: SamplingState, logits: torch.Tensor, rows: list[int], positions: list[int]) -> SamplerOutput:
    """One step of these rows."""
    rows = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    return Sampler()(logits, state, rows, state.flags, torch.tensor(positions, dtype=torch.int64, device=logits.device))


def draws(params: SamplingParams, logits: torch.Tensor, num_draws: int) -> torch.Tensor:
    """[num_draws] tokens of one request at successive positions, all from `logits` [V]."""
    state = make_state(params, device=logits.device.type, vocab_size=logits.shape[0])
    rows = torch.ones(num_draws, dtype=torch.int64, device=logits.device)
    positions = torch.arange(num_draws, device=logits.device)
    return Sampler()(logits.expand(num_draws, -1), state, rows, state.flags, positions).token_ids


def assert_drawn_from(tokens: torch.Tensor, probs: torch.Tensor) -> None:
    """Chi-square: `tokens` [N] look drawn from `probs` [V]; tokens without probability were never drawn.

    Tokens expected fewer than 10 times are one bin. The bound is 4 standard deviations above the mean (p about 1e-4);
    the seeds of tests are fixed, so a test passes always or never.
    """
    counts = torch.bincount(tokens.cpu(), minlength=probs.shape[0]).double()
    expected = probs.cpu().double() * tokens.shape[0]
    assert counts[expected == 0].sum() == 0, "tokens without probability were drawn"
    rare = expected < 10
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = len(expected) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5, f"chi-square {statistic:.1f} at {freedom} degrees of freedom"


def scored_by_torch(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Scores tokens as the kernels do, by torch's operations."""
    scores, factors, token_ids = inputs
    scores = scores.double() * factors[:, None].double()
    chosen = scores.gather(1, token_ids.clamp(min=0)[:, None])
    top = scores.amax(-1, keepdim=True)
    top = torch.where(top.isfinite() & ~scores.isnan().any(-1, keepdim=True), top, torch.nan)
    log_sum = (scores - top).exp().sum(-1, keepdim=True).log()
    ranks = (scores > chosen).sum(-1, keepdim=True) + 1
    return [torch.cat([chosen - top - log_sum, top, log_sum, ranks.double()], 1).T.contiguous().float()]
