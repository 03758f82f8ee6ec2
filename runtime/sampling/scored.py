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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores of each row by its mode: [S, V] of any float type, and factors [S] float32, by which they are yet
        to be multiplied. No sync.

        Args:
            modes: all that rows have, one at least.
            row_modes: [S] int: index into LOGPROBS_MODES.
            temperatures: [S] float32.
        """
        first, *others = modes
        chosen, factors = self._source(first), self._factors(first, temperatures)
        sources = [self._source(mode) for mode in others]
        are_one = all(source is chosen for source in sources)
        for mode, source in zip(others, sources, strict=True):
            has_mode = row_modes == LOGPROBS_MODES.index(mode)
            chosen = chosen if are_one else torch.where(has_mode[:, None], source.float(), chosen.float())
            factors = torch.where(has_mode, self._factors(mode, temperatures), factors)
        return chosen, factors

    def _source(self, mode: LogprobsMode) -> torch.Tensor:
        if mode == "raw_logprobs":
            return self.logits
        if mode == "tempered_logprobs" or self.filtered is None:
            return self.adjusted
        return self.filtered[:, : self.logits.shape[1]]

    def _factors(self, mode: LogprobsMode, temperatures: torch.Tensor) -> torch.Tensor:
        """[S]: 1 / temperature, as padded_scores has it, where the mode's source is yet to be divided."""
        is_divided = mode == "tempered_logprobs" or (mode == "processed_logprobs" and self.filtered is None)
        return temperatures.reciprocal() if is_divided else torch.ones_like(temperatures)


def packed_bits(is_kept: torch.Tensor) -> torch.Tensor:
    """[S, V] bool → [S, ⌈V / 8⌉] uint8, the first token in the highest bit, as numpy.unpackbits reads them."""
    padded = torch.nn.functional.pad(is_kept, (0, -is_kept.shape[1] % 8))
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=is_kept.device)
    return (padded.view(is_kept.shape[0], padded.shape[1] // 8, 8) * weights).sum(dim=-1, dtype=torch.uint8)
