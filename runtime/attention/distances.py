"""Bias of logits that depends on distance alone, as T5 has it: a table that is read at each."""

from __future__ import annotations

import torch


def of_distances(table: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
    """The bias [H, …] float32 of distances […] from queries to keys, by a table [H, 2R + 1]; those beyond R share its
    ends."""
    reach = table.shape[1] // 2
    bias: torch.Tensor = table[:, distances.clamp(-reach, reach) + reach].float()
    return bias
