"""The scores whose softmax log-probabilities are of: the model's logits, or what the draw has, by each row's mode.

- raw_logprobs: logits as the model gave them, as vLLM's default is.
- tempered_logprobs: after bias, penalties, forbidden tokens and temperature, as SGLang has them.
- processed_logprobs: after filters too, which vLLM calls so: the distribution that the token was drawn from.

A greedy row has temperature 1 and no filters. Which modes other rows have changes no row's scores.

Shape legend: S rows, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mllm_compile.runtime.config_sections import LOGPROBS_MODES, LogprobsMode


@dataclass(frozen=True, slots=True)
class DrawScores:
    """The scores of a step's rows on the way to the draw.

    Attributes:
        logits: [S, V] as the model gave them.
        adjusted: [S, V] with bias and penalties, and -inf for what is forbidden; `logits` where nothing changes them.
        filtered: [S, ≥ V] float32: adjusted / temperature, and -inf for what filters leave out; None without filters.
    """

    logits: torch.Tensor
    adjusted: torch.Tensor
    filtered: torch.Tensor | None = None

    def of_modes(
        self, modes: Sequence[LogprobsMode], row_modes: torch.Tensor, temperatures: torch.Tensor
    ) -> torch.Tensor:
        """The scores of each row by its mode, [S, V] of any float type. No sync.

        Args:
            modes: all that rows have, one at least.
            row_modes: [S] int: index into LOGPROBS_MODES.
            temperatures: [S] float32.
        """
        first, *others = modes
        chosen = self._of(first, temperatures)
        for mode in others:
            has_mode = (row_modes == LOGPROBS_MODES.index(mode))[:, None]
            chosen = torch.where(has_mode, self._of(mode, temperatures).float(), chosen.float())
        return chosen

    def _of(self, mode: LogprobsMode, temperatures: torch.Tensor) -> torch.Tensor:
        if mode == "raw_logprobs":
            return self.logits
        if mode == "tempered_logprobs" or self.filtered is None:
            return self.adjusted * temperatures.reciprocal()[:, None]  # as padded_scores does
        return self.filtered[:, : self.logits.shape[1]]


def packed_bits(is_kept: torch.Tensor) -> torch.Tensor:
    """[S, V] bool → [S, ⌈V / 8⌉] uint8, the first token in the highest bit, as numpy.unpackbits reads them."""
    padded = torch.nn.functional.pad(is_kept, (0, -is_kept.shape[1] % 8))
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=is_kept.device)
    return (padded.view(is_kept.shape[0], padded.shape[1] // 8, 8) * weights).sum(dim=-1, dtype=torch.uint8)
