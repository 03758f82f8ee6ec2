"""Repetition, frequency and presence penalties over per-request token counts that live on the device.

Frequency and presence count the output only; repetition counts prompt and output. A request without penalties has no
counts: it points to row 0, which is shared, never read to any effect, and keeps the batch free of branches.

Shape legend: S rows of a step, N rows of counts, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mllm_compile.runtime.device.upload import upload

_FIRST_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class TokenHistories:
    """The tokens that each row's request has seen. prompt_mask: [S, V] bool. output_counts: [S, V] int32."""

    prompt_mask: torch.Tensor
    output_counts: torch.Tensor

    def add(self, token_ids: torch.Tensor) -> None:
        """Count further tokens of the output, in place. token_ids: [S, K] int64, negative ones are none."""
        self.output_counts.scatter_add_(1, token_ids.clamp(min=0), (token_ids >= 0).to(torch.int32))


@dataclass(frozen=True, kw_only=True)
class PenaltyParams:
    """Penalties of each row, and what they apply to. The penalties: [S] float32 on the logits' device."""

    repetition_penalties: torch.Tensor
    frequency_penalties: torch.Tensor
    presence_penalties: torch.Tensor
    token_histories: TokenHistories


def apply_penalties(logits: torch.Tensor, params: PenaltyParams) -> None:
    """Penalise logits in place. logits: [S, V] float32. A row of 1, 0, 0 keeps its very values."""
    counts = params.token_histories.output_counts
    in_output = counts > 0
    factor = torch.where(params.token_histories.prompt_mask | in_output, params.repetition_penalties[:, None], 1.0)
    divided = logits / factor
    torch.where(logits > 0, divided, factor.mul_(logits), out=logits)
    del factor, divided  # as large as the logits each
    logits.sub_(counts * params.frequency_penalties[:, None])
    logits.sub_(in_output * params.presence_penalties[:, None])


class TokenCounts:
    """Rows of counts, handed out to the requests that use penalties; 5 bytes a token of the vocabulary each.

    They start with none and double when they run out, so that requests without penalties cost nothing (at 256 requests
    and 152k tokens all of them are 195 MB). Host bookkeeping; the device work is queued on the current stream.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._prompt_mask = torch.zeros(1, vocab_size, dtype=torch.bool, device=device)
        self._output_counts = torch.zeros(1, vocab_size, dtype=torch.int32, device=device)
        self._free: list[int] = []

    def allocate(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> int:
        """A row that has counted these tokens; a prompt's placeholders may be beyond the vocabulary."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        device, prompt = self._output_counts.device, np.asarray(prompt_token_ids, np.int64)
        prompt = prompt[prompt < self._prompt_mask.shape[1]]
        self._prompt_mask[row].zero_().index_fill_(0, upload(prompt, device), True)
        output = upload(np.asarray(output_token_ids, np.int64), device)
        self._output_counts[row].zero_().scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        return row

    def free(self, row: int) -> None:
        """Take `row` back. A step in flight may still count into it; allocate() clears it after that step."""
        self._free.append(row)

    def gather(self, count_rows: torch.Tensor) -> TokenHistories:
        """Histories of these rows. count_rows: [S] int64."""
        return TokenHistories(prompt_mask=self._prompt_mask[count_rows], output_counts=self._output_counts[count_rows])

    def record(self, count_rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Count one output token a row, in place. count_rows, token_ids: [S] int64; row 0 may occur many times."""
        flat = self._output_counts.view(-1)
        ones = torch.ones_like(token_ids, dtype=torch.int32)
        flat.scatter_add_(0, count_rows * self._output_counts.shape[1] + token_ids, ones)

    def _grow(self) -> None:
        old = self._output_counts.shape[0]
        added = _FIRST_ROWS if old == 1 else old - 1
        self._prompt_mask = torch.cat(
            [self._prompt_mask, self._prompt_mask.new_zeros(added, *self._prompt_mask.shape[1:])]
        )
        self._output_counts = torch.cat(
            [self._output_counts, self._output_counts.new_zeros(added, *self._output_counts.shape[1:])]
        )
        self._free.extend(range(old + added - 1, old - 1, -1))
