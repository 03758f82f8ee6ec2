"""Forbids a request's next tokens, or makes them more or less likely: all but a list (allowed_token_ids), the ends of
phrases (bad_words), and listed ids (logit_bias, and min_tokens' ends).

The first two add -inf to logits on the device, so that what is no number stays none. A phrase is compared with the
newest tokens of the output, which stay on the device too: a step may be planned before the host knows the tokens of the
    one before.

Shape legend: S rows of a step, N masks, K phrases or listed ids of a row, H tokens before the last of the longest, V
vocab.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from mllm_compile.runtime.device.upload import upload

# In the place of a phrase's token, and of a token of the output; ids are 0 and above.
_ANY, _NEVER, _NO_OUTPUT = -2, -3, -1


class AllowedTokens:
    """Masks of the vocabulary for rows that may have listed tokens only; V bytes each, handed out as needed.

    Rows without one point to mask 0, which allows all.
    """

    def __init__(self, max_reqs: int, vocab_size: int, device: torch.device) -> None:
        self._masks = torch.ones(1, vocab_size, dtype=torch.bool, device=device)  # [N, V]
        self._mask_of_row = torch.zeros(max_reqs, dtype=torch.int64, device=device)
        self._mask_of: dict[int, int] = {}  # the same on the host, of rows that have one
        self._free: list[int] = []

    def set(self, row: int, token_ids: Sequence[int]) -> None:
        """Allow the row these tokens alone."""
        if not self._free:
            self._grow()
        mask = self._mask_of[row] = self._free.pop()
        ids = upload(np.asarray(token_ids, np.int64), self._masks.device)
        self._masks[mask].zero_().index_fill_(0, ids, True)
        self._mask_of_row[row] = mask

    def clear(self, row: int) -> None:
        """Allow the row all tokens again. A step in flight may still read its mask: it is changed after that step."""
        mask = self._mask_of.pop(row, None)
        if mask is not None:
            self._free.append(mask)
            self._mask_of_row[row] = 0

    def forbid_others(self, logits: torch.Tensor, rows: torch.Tensor) -> None:
        """Add -inf to all logits except a row's tokens', in place. logits: [S, V] float32; rows: [S] int64."""
        logits.add_(torch.where(self._masks[self._mask_of_row[rows]], 0.0, -torch.inf))

    def _grow(self) -> None:
        old = self._masks.shape[0]
        self._masks = torch.cat([self._masks, torch.zeros_like(self._masks)])
        self._free.extend(range(2 * old - 1, old - 1, -1))


class ForbiddenPhrases:
    """Token sequences whose last token is forbidden where the output ends in those before. K and H grow as needed."""

    def __init__(self, max_reqs: int, device: torch.device) -> None:
        self._last_ids = torch.zeros(max_reqs, 0, dtype=torch.int64, device=device)  # [rows, K]
        self._prefixes = torch.zeros(max_reqs, 0, 1, dtype=torch.int32, device=device)  # [rows, K, H]
        self._outputs = torch.zeros(max_reqs, 1, dtype=torch.int32, device=device)  # [rows, H], the newest last

    def set(self, row: int, phrases: Sequence[Sequence[int]], output_token_ids: Sequence[int] = ()) -> None:
        """Make these the row's phrases, none of them empty; without any it is cleared.

        Args:
            output_token_ids: the request's output so far.
        """
        self._widen(len(phrases), max((len(phrase) - 1 for phrase in phrases), default=0))
        _, num_phrases, width = self._prefixes.shape
        last_ids = np.zeros(num_phrases, np.int64)
        prefixes = np.full((num_phrases, width), _NEVER, np.int32)
        for index, phrase in enumerate(phrases):
            last_ids[index] = phrase[-1]
            prefixes[index] = [_ANY] * (width - len(phrase) + 1) + list(phrase[:-1])
        newest = list(output_token_ids[-width:])
        outputs = np.array([_NO_OUTPUT] * (width - len(newest)) + newest, np.int32)
        device = self._outputs.device
        self._last_ids[row] = upload(last_ids, device)
        self._prefixes[row] = upload(prefixes, device)
        self._outputs[row] = upload(outputs, device)

    def forbid(self, logits: torch.Tensor, rows: torch.Tensor, drafted: torch.Tensor | None = None) -> None:
        """Add -inf to the ends of phrases that outputs begin, in place.

        Args:
            logits: [S, V] float32.
            rows: [S] int64.
            drafted: [S, K] int64: further tokens of each output, negative behind them.
        """
        prefixes, outputs = self._prefixes[rows], self._outputs[rows]
        if drafted is not None:
            outputs = _newest(outputs, drafted, (drafted >= 0).sum(dim=1))
        begins = ((prefixes == outputs[:, None]) | (prefixes == _ANY)).all(dim=-1)
        logits.scatter_add_(1, self._last_ids[rows], torch.where(begins, -torch.inf, 0.0))

    def record(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Take one output token a row into account. rows, token_ids: [S] int64; row 0 may occur many times."""
        newest = torch.cat([self._outputs[rows, 1:], token_ids[:, None].to(torch.int32)], dim=1)
        self._outputs.index_copy_(0, rows, newest)

    def record_runs(self, rows: torch.Tensor, token_ids: torch.Tensor, counts: torch.Tensor) -> None:
        """Take counts [Q] of the token_ids [Q, N] into account, a row each; rows: [Q] int64."""
        self._outputs.index_copy_(0, rows, _newest(self._outputs[rows], token_ids, counts))

    def _widen(self, num_phrases: int, num_before: int) -> None:
        _, count, width = self._prefixes.shape
        more = max(0, (1 << (num_phrases - 1).bit_length()) - count) if num_phrases else 0
        longer = max(0, num_before - width)
        if more:
            self._last_ids = pad(self._last_ids, (0, more))
            self._prefixes = pad(self._prefixes, (0, 0, 0, more), value=_NEVER)
        if longer:
            # Older phrases look back no further: an entry that never matches still has its own column.
            self._prefixes = pad(self._prefixes, (longer, 0), value=_ANY)
            self._outputs = pad(self._outputs, (longer, 0), value=_NO_OUTPUT)


def _newest(outputs: torch.Tensor, token_ids: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The last H of each row of outputs [S, H] int32 and the first counts [S] of token_ids [S, N] behind it."""
    columns = torch.arange(outputs.shape[1], device=outputs.device) + counts[:, None]
    return torch.cat([outputs, token_ids.to(torch.int32)], dim=1).gather(1, columns)


class TokenBiases:
    """Lists of (token id, value), padded with (0, 0.0), which changes nothing; K grows by doubling."""

    def __init__(self, max_reqs: int, device: torch.device) -> None:
        self._ids = torch.zeros(max_reqs, 0, dtype=torch.int64, device=device)
        self._values = torch.zeros(max_reqs, 0, dtype=torch.float32, device=device)

    def set(self, row: int, additions: Mapping[int, float]) -> None:
        """Make `additions` (token id → value) the row's list; an empty one clears it."""
        count, width = len(additions), self._ids.shape[1]
        if count > width:
            added = (1 << (count - 1).bit_length()) - width
            self._ids, self._values = pad(self._ids, (0, added)), pad(self._values, (0, added))
        self._ids[row, :count] = upload(np.fromiter(additions.keys(), np.int64, count), self._ids.device)
        self._values[row].zero_()
        self._values[row, :count] = upload(np.fromiter(additions.values(), np.float32, count), self._ids.device)

    def add_to(self, logits: torch.Tensor, rows: torch.Tensor, active: torch.Tensor | None = None) -> None:
        """Add the rows' values to their logits, in place. logits: [S, V] float32; rows: [S] int64; active: [S] bool."""
        values = self._values[rows]
        if active is not None:
            values = torch.where(active[:, None], values, 0.0)
        logits.scatter_add_(1, self._ids[rows], values)
