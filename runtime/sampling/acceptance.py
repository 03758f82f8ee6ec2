"""How much of a draft is accepted: the longest beginning that the sampler has chosen as well.

The sampler chooses a token behind the last one and behind each drafted one, as it would without a draft: a choice
depends on the logits, the seed and the position alone. So an answer is, token for token, the one without drafts. Where
drafts are no draws, rejection sampling accepts as often (Leviathan et al., arXiv 2211.17192).

Shape legend: Q requests, K most tokens of a draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from mllm_compile.runtime.sampling.counter_rng import row_keys, uniform
from mllm_compile.runtime.sampling.params import NO_TOKEN

SYNTHETIC = 0x5BF03635  # keeps its numbers apart from those of draws


@dataclass(frozen=True, slots=True)
class AcceptedTokens:
    """The tokens of a verify step, on the device.

    Attributes:
        token_ids: [Q, K + 1] int64: as many of each as `counts` says.
        counts: [Q] int64, from 1 to K + 1: accepted tokens, and the choice behind them.
        broken_drafts: [Q] bool: of a request with a draft some logits were no numbers. That may be the draft's fault,
            even at the tokens before it: attention multiplies masked values with 0.
    """

    token_ids: torch.Tensor
    counts: torch.Tensor
    broken_drafts: torch.Tensor

    @property
    def newest(self) -> torch.Tensor:
        """[Q] int64: the last token of each."""
        return self.token_ids.gather(1, self.counts[:, None] - 1).squeeze(1)

    def packed(self) -> torch.Tensor:
        """All of it, [Q * (K + 3)] int64."""
        return torch.cat((self.token_ids.flatten(), self.counts, self.broken_drafts.long()))


def drafted_before(places: torch.Tensor, draft_ids: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The drafted tokens that each row of logits stands behind: [num_rows, K] int64, NO_TOKEN behind them.

    Args:
        places: [Q, K + 1] int64: the rows of each request; behind its draft the last one again.
        draft_ids: as `accept` takes them.
    """
    columns = torch.arange(draft_ids.shape[1], device=draft_ids.device)
    rows = torch.arange(places.shape[1], device=draft_ids.device)[:, None]
    of_places = torch.where(columns < rows, draft_ids[:, None, :], NO_TOKEN)  # [Q, K + 1, K]
    before = draft_ids.new_full((num_rows, draft_ids.shape[1]), NO_TOKEN)
    return before.index_copy_(0, places.flatten(), of_places.flatten(0, 1))


def accept(choices: torch.Tensor, draft_ids: torch.Tensor) -> AcceptedTokens:
    """Accepts of each draft what was chosen as well. No sync.

    Args:
        choices: [Q, K + 1] int64: the choice behind the last token, and behind each drafted one.
        draft_ids: [Q, K] int64; NO_TOKEN behind a draft.
    """
    agrees = (choices[:, :-1] == draft_ids) & (draft_ids != NO_TOKEN)
    counts = agrees.long().cumprod(dim=1).sum(dim=1) + 1
    return AcceptedTokens(choices, counts, (choices == NO_TOKEN).any(dim=1) & (draft_ids[:, 0] != NO_TOKEN))


def accept_synthetically(
    choices: torch.Tensor, draft_ids: torch.Tensor, length: float, seeds: torch.Tensor, positions: torch.Tensor
) -> AcceptedTokens:
    """Accepts so many drafted tokens that requests get `length` tokens a step on average, whatever was chosen.

    For benchmarks, whose drafts all have K tokens: each accepts the whole part of length - 1, and one more by a coin.

    Args:
        choices, draft_ids: as `accept` takes them.
        seeds, positions: [Q] int, of the coins.
    """
    whole, part = divmod(length - 1, 1)
    coins = uniform(row_keys(seeds ^ SYNTHETIC, positions), 1)[:, 0] < part
    counts = torch.minimum(coins.long() + int(whole), (draft_ids != NO_TOKEN).sum(dim=1))
    is_accepted = torch.arange(choices.shape[1], device=choices.device) < counts[:, None]
    token_ids = torch.where(is_accepted, functional.pad(draft_ids, (0, 1)), choices)
    return AcceptedTokens(token_ids, counts + 1, torch.zeros_like(coins))
