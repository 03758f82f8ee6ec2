"""Log-probabilities of given tokens and of the most probable ones: the log-softmax of scores.

A sampled token is scored by its request's mode (scored.py), and a prompt by the model's logits, with the next prompt
token as the target of each row.

Shape legend: S rows, V vocab, K alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

_READ_AT_ONCE = 4  # float32 numbers
_CHUNK_ELEMENTS = 2**24  # float32 logits worked on at a time: 64 MiB, and as much again for their exponentials


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Device tensors, one row a token; all log-probabilities of a row are NaN where its logits hold NaN or inf.

    Attributes:
        logprobs: [S] float32: of the given token.
        ranks: [S] int64: 1 for the most probable token; tokens that tie share the better rank.
        top_token_ids: [S, K] int64, most probable first.
        top_logprobs: [S, K] float32.
    """

    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_token_ids: torch.Tensor
    top_logprobs: torch.Tensor

    @classmethod
    def concatenate(cls, parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
        """The rows of one part after another."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            logprobs=torch.cat([part.logprobs for part in parts]),
            ranks=torch.cat([part.ranks for part in parts]),
            top_token_ids=torch.cat([part.top_token_ids for part in parts]),
            top_logprobs=torch.cat([part.top_logprobs for part in parts]),
        )


class ScorePieces(Protocol):
    """The kernels of a program that score tokens (ops/tokens/score.py).

    Attributes:
        dtype: of the program's logits.
        score: (scores [S, V] of that type, factors [S] float32, token_ids [S]) → ([4, S] float32,).
        score_floats: (float32 scores [S, V], factors, token_ids) → the same, to the last bit.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def score(self) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]: ...

    @property
    def score_floats(self) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]: ...


def token_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_top: int,
    factors: torch.Tensor | None = None,
    pieces: ScorePieces | None = None,
) -> TokenLogprobs:
    """Log-probabilities of one token a row, and of the row's `num_top` most probable ones.

    By the program's kernels in one pass. Else rows are taken a chunk at a time, so that a long prompt's float32 copies
    stay small beside its logits. No sync.

    Args:
        logits: [S, V], any float dtype; computed in float32.
        token_ids: [S] int64: for prompt row i (logits after token i) the prompt's token i + 1. Negative: any token.
        num_top: K, from 0 to V.
        factors: [S] float32, positive: of the logits, times these, the log-probabilities are; None: of the logits.
    """
    if pieces is not None:
        logprobs, largest, log_sums, ranks = _score(pieces, logits, token_ids, factors)
        top = logits.topk(num_top, dim=-1).indices if num_top else token_ids.new_empty(len(token_ids), 0)
        scores = _multiplied(logits.gather(1, top), factors)
        return TokenLogprobs(
            logprobs=logprobs,
            ranks=ranks.long(),
            top_token_ids=top,
            top_logprobs=scores - largest[:, None] - log_sums[:, None],
        )
    logits = logits if factors is None else _multiplied(logits, factors)
    rows = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    return TokenLogprobs.concatenate(
        [
            _chunk_logprobs(logits_part, ids_part, num_top)
            for logits_part, ids_part in zip(logits.split(rows), token_ids.split(rows), strict=True)
        ]
    )


def all_logprobs(
    logits: torch.Tensor, factors: torch.Tensor | None = None, pieces: ScorePieces | None = None
) -> torch.Tensor:
    """Log-probabilities of all tokens, as token_logprobs computes them. [S, V] → [S, V] float32. No sync.

    torch's log-softmax has a block a row, in which sums are in the same order whatever the number of rows; logsumexp
    divides few rows among more blocks. A row begins where float32 is read in fours, as another sum would begin there.
    """
    if pieces is not None:
        any_token = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        _, largest, log_sums, _ = _score(pieces, logits, any_token, factors)
        return _multiplied(logits, factors) - largest[:, None] - log_sums[:, None]
    vocab_size, scores = logits.shape[1], _multiplied(logits, factors)
    if missing := -vocab_size % _READ_AT_ONCE:
        scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
    return scores.log_softmax(dim=-1)[:, :vocab_size]


def _multiplied(logits: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """[S, ·] float32: logits times the factors of their rows."""
    return logits.float() if factors is None else logits.float() * factors[:, None]


def _score(
    pieces: ScorePieces, logits: torch.Tensor, token_ids: torch.Tensor, factors: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """The four rows that the kernels give."""
    factors = logits.new_ones(len(logits), dtype=torch.float32) if factors is None else factors
    is_of_program = logits.dtype == pieces.dtype
    given = logits if is_of_program else logits.float()
    score = pieces.score if is_of_program else pieces.score_floats
    return score([given.contiguous(), factors, token_ids.contiguous()])[0].unbind(0)


def _chunk_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> TokenLogprobs:
    logprobs, token_ids = all_logprobs(logits), token_ids[:, None].clamp(min=0)  # one NaN or inf makes all NaN
    top_token_ids = logits.topk(num_top, dim=-1).indices
    return TokenLogprobs(
        logprobs=logprobs.gather(1, token_ids).squeeze(1),
        ranks=(logits > logits.gather(1, token_ids)).sum(dim=-1) + 1,
        top_token_ids=top_token_ids,
        top_logprobs=logprobs.gather(1, top_token_ids),
    )
