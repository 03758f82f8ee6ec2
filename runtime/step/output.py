"""The results of one step on the host: tokens, and log-probabilities where requests asked for them. Free of torch.

Shape legend: R rows of the step, S sampled rows, N prompt positions, K alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mllm_compile.runtime.schedule.request import Request
    from mllm_compile.runtime.schedule.scheduled_batch import TokenRuns


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probabilities of one position, by the distribution that the request's logprobs_mode says.

    Attributes:
        token_id: the token that was sampled, or is in the prompt.
        logprob: its natural-log probability.
        rank: 1 when no token is likelier.
        top: (token id, log-probability) of the likeliest tokens, best first; as many as were asked for.
        of_all: [V] float32, log-probabilities by token id, if the whole vocabulary's were asked for.
        kept: ids of the tokens that filters kept, [≤ V] int32 ascending, if they were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
    of_all: np.ndarray | None = None
    kept: np.ndarray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ScoreTable:
    """TokenLogprobs on the host, a row a token."""

    token_ids: np.ndarray  # [N] int64
    logprobs: np.ndarray  # [N] float32
    ranks: np.ndarray  # [N] int64
    top_token_ids: np.ndarray  # [N, K] int64
    top_logprobs: np.ndarray  # [N, K] float32

    def row(
        self, index: int, num_top: int, of_all: np.ndarray | None = None, kept: np.ndarray | None = None
    ) -> TokenScores:
        """One token's scores with its `num_top` alternatives, the whole vocabulary's ([V]), and kept tokens' bits."""
        return TokenScores(
            token_id=int(self.token_ids[index]),
            logprob=float(self.logprobs[index]),
            rank=int(self.ranks[index]),
            top=tuple(
                zip(
                    self.top_token_ids[index, :num_top].tolist(),
                    self.top_logprobs[index, :num_top].tolist(),
                    strict=True,
                )
            ),
            of_all=of_all,
            kept=None if kept is None else np.flatnonzero(np.unpackbits(kept)).astype(np.int32),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepOutput:
    """The tokens of a step and their scores; see the module's header.

    Attributes:
        token_ids: [R] int64, the newest of each row; NO_TOKEN in rows that were not sampled, or whose logits hold
            NaN or inf or nothing finite; NONE_ALLOWED in those whose request forbids all tokens.
        requests: the rows' requests.
        scores: the sampled tokens' scores, None when no request wants them.
        score_rows: [S] index into R of the sampled tokens, and so of each row of `scores`; ascending, with one for each
            token of a draft and the one behind.
        prompt_scores: prompt tokens' scores, None when no row of the step has any.
        prompt_rows: [N] index into R of each row of `prompt_scores`, ascending.
        all_scores: row of `scores` → log-probabilities of the whole vocabulary, [V] float32, for requests that asked.
        kept: row of `scores` → a bit for each token that filters kept, for requests that asked.
        runs: all tokens of a verify step; None: each row has one.
    """

    token_ids: np.ndarray
    requests: list[Request]
    scores: ScoreTable | None
    score_rows: np.ndarray
    prompt_scores: ScoreTable | None
    prompt_rows: np.ndarray
    all_scores: dict[int, np.ndarray] = field(default_factory=dict)
    kept: dict[int, np.ndarray] = field(default_factory=dict)
    runs: TokenRuns | None = None

    @property
    def broken_rows(self) -> np.ndarray:
        """[≤ R] int64, ascending: rows that have no next token, and those whose scored prompt tokens' logits were no
        numbers."""
        sampled = self.score_rows
        if self.runs is not None:  # a broken draft is not the request's fault
            sampled = np.flatnonzero((self.runs.counts > 0) & ~self.runs.broken_drafts)
        broken: np.ndarray = sampled[self.token_ids[sampled] < 0]
        if self.prompt_scores is not None:
            broken = np.union1d(broken, self.prompt_rows[np.isnan(self.prompt_scores.logprobs)])
        return broken

    def record_logprobs(self, accepted: Sequence[int], counts: Sequence[int] | None = None) -> None:
        """Append TokenScores to the requests that asked for them.

        Args:
            accepted: rows whose token was appended to its request (UpdateResult.accepted); the scores of other rows'
                tokens are dropped with them. Prompt scores are kept unless the request was over before this step.
            counts: how many were appended for each of these; None: one.
        """
        if self.prompt_scores is not None:
            taken = set(accepted)  # such a request may have ended with this very token
            for index, row in enumerate(self.prompt_rows.tolist()):
                request = self.requests[row]
                is_wanted = row in taken or not request.is_finished
                if is_wanted and request.params.prompt_logprobs is not None:
                    request.prompt_logprobs.append(self.prompt_scores.row(index, request.params.prompt_logprobs))
        if self.scores is not None:
            firsts = np.searchsorted(self.score_rows, accepted).tolist()
            for row, first, count in zip(accepted, firsts, counts or [1] * len(firsts), strict=True):
                request = self.requests[row]
                if request.params.logprobs is not None:
                    num_top = max(request.params.logprobs, 0)
                    for index in range(first, first + count):
                        scores = self.scores.row(index, num_top, self.all_scores.get(index), self.kept.get(index))
                        request.output_logprobs.append(scores)
                        request.num_kept += 0 if scores.kept is None else scores.kept.size
