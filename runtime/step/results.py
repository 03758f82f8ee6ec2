"""The results of a launched step: on their way to the host, and as its caller waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from mllm_compile.runtime.device.staging import StagingBuffer
from mllm_compile.runtime.sampling.logprobs import TokenLogprobs
from mllm_compile.runtime.sampling.params import NO_TOKEN
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch, TokenRuns
from mllm_compile.runtime.step.output import ScoreTable, StepOutput
from mllm_compile.runtime.step.plan import StepPlan

if TYPE_CHECKING:
    from mllm_compile.runtime.cuda_graph.decode_loop import HostSlot

ForSome = tuple[np.ndarray, torch.Tensor]  # which of the sampled tokens [F], and [F, …] of each


@dataclass(frozen=True, slots=True)
class SampledScores:
    """Scores of a step's sampled tokens on the device, as far as requests want them.

    Attributes:
        table: of each token.
        of_all: [F, V] float32 log-probabilities of the whole vocabulary.
        kept: [F, ⌈V / 8⌉] uint8: a bit for each token that filters kept (scored.packed_bits).
    """

    table: TokenLogprobs | None = None
    of_all: ForSome | None = None
    kept: ForSome | None = None


class StepResults:
    """The results of a step, on their way to the host."""

    def __init__(
        self,
        buffer: StagingBuffer | HostSlot,
        tokens: np.ndarray | None,
        scores: SampledScores,
        prompt_scores: TokenLogprobs | None = None,
    ) -> None:
        """
        Args:
            buffer: the host's memory of the step.
            tokens: [S] int64, a part of it that is being written; of a verify step AcceptedTokens.packed.
        """
        self._buffer = buffer
        self._tokens = tokens
        self._scores = None if scores.table is None else _download(scores.table)
        self._prompt_scores = None if prompt_scores is None else _download(prompt_scores)
        self._of_all, self._kept = _download_some(scores.of_all), _download_some(scores.kept)
        self._buffer.record()

    @property
    def num_drafted(self) -> np.ndarray | None:
        """[Q] tokens drafted for each request of a verify step, once it is over; None: as many as were planned."""
        return None

    def tokens(self) -> np.ndarray | None:
        """The sampled tokens, once the copies are over; valid until the buffers come round."""
        self._buffer.wait()
        return self._tokens

    def fetch_all(self) -> dict[int, np.ndarray]:
        """Scores of the whole vocabulary by sampled token: [V] float32, to be kept. Called after `fetch`."""
        return _by_token(self._of_all)

    def fetch_kept(self) -> dict[int, np.ndarray]:
        """SampledScores.kept by sampled token, likewise."""
        return _by_token(self._kept)

    def fetch(self) -> tuple[np.ndarray | None, list[np.ndarray] | None, list[np.ndarray] | None]:
        """(sampled tokens, columns of their scores, columns of prompt scores), once the copies are over.

        The tokens are valid until the buffers come round.
        """
        tokens = self.tokens()
        scores, prompt_scores = (
            None if tensors is None else [tensor.numpy() for tensor in tensors]
            for tensors in (self._scores, self._prompt_scores)
        )
        return tokens, scores, prompt_scores


class StepHandle:
    """A step that was launched; `wait` gives its result."""

    def __init__(self, batch: ScheduledBatch, plan: StepPlan, results: StepResults) -> None:
        self._batch = batch
        self._plan = plan
        self._results = results

    def wait_for_tokens(self) -> None:
        """Block until the step's tokens are on the host."""
        self._results.tokens()

    def token_of(self, request: Request, place: int) -> int:
        """The token of a request that the step sampled, negative where it has none; after `wait_for_tokens`.

        Args:
            place: the request's likely index in the batch.
        """
        requests, plan, tokens = self._batch.requests, self._plan, self._results.tokens()
        assert plan.runs is None, "a verify step is over before the next one begins"
        if place >= len(requests) or requests[place] is not request:
            place = requests.index(request)
        assert tokens is not None, "the request was sampled"
        return int(tokens[plan.token_indices[np.searchsorted(plan.sampled, place)]])

    def wait(self) -> StepOutput:
        """Block until the step is over.

        Raises:
            RuntimeError: an error of the device, in this step or an earlier one.
        """
        tokens, scores, prompt_scores = self._results.fetch()
        plan = self._plan
        token_ids = np.full(self._batch.num_requests, NO_TOKEN, dtype=np.int64)
        runs = None
        if tokens is not None and plan.runs is not None:
            tokens, runs = _unpack(tokens, plan, self._batch.num_requests, self._results.num_drafted)
            newest = np.maximum(runs.counts - 1, 0)[:, None]
            token_ids = np.where(runs.counts > 0, np.take_along_axis(runs.token_ids, newest, axis=1)[:, 0], NO_TOKEN)
        elif tokens is not None:
            token_ids[plan.sampled] = tokens[plan.token_indices]
        targets = plan.fields.prompt_targets
        return StepOutput(
            token_ids=token_ids,
            runs=runs,
            requests=self._batch.requests,
            scores=_table(tokens, scores, plan.token_indices),
            score_rows=plan.sampled,
            prompt_scores=_table(targets, prompt_scores, plan.score_indices),
            prompt_rows=plan.prompt_rows,
            all_scores=self._results.fetch_all(),
            kept=self._results.fetch_kept(),
        )


def _unpack(
    packed: np.ndarray, plan: StepPlan, num_requests: int, num_drafted: np.ndarray | None
) -> tuple[np.ndarray, TokenRuns]:
    """The tokens of the step's rows of logits, as far as they were accepted, and the tokens of each request."""
    assert plan.runs is not None, "the plan of a verify step"
    places, requests = plan.runs.places, plan.runs.requests
    of_requests, counts, broken_drafts = np.split(packed, (places.size, places.size + len(requests)))
    of_requests = of_requests.reshape(places.shape)
    tokens = np.zeros(int(plan.token_indices.max()) + 1, dtype=np.int64)
    tokens[plan.token_indices[places]] = of_requests
    runs = TokenRuns(
        np.full((num_requests, places.shape[1]), NO_TOKEN, dtype=np.int64),
        np.zeros(num_requests, dtype=np.int64),
        np.zeros(num_requests, dtype=bool),
        np.zeros(num_requests, dtype=np.int64),
    )
    runs.num_drafted[requests] = (plan.runs.draft_ids != NO_TOKEN).sum(axis=1) if num_drafted is None else num_drafted
    runs.token_ids[requests], runs.counts[requests], runs.broken_drafts[requests] = of_requests, counts, broken_drafts
    return tokens, runs


def _table(token_ids: np.ndarray | None, scores: Sequence[np.ndarray] | None, rows: np.ndarray) -> ScoreTable | None:
    """These rows of the scores of token_ids."""
    if token_ids is None or scores is None:
        return None
    return ScoreTable(token_ids[rows], *(column[rows] for column in scores))


def _download(scores: TokenLogprobs) -> list[torch.Tensor]:
    """Copies on the host in ScoreTable's order, in flight until the stream gets there; CPU tensors as they are."""
    return _to_host([scores.logprobs, scores.ranks, scores.top_token_ids, scores.top_logprobs])


def _download_some(scores: ForSome | None) -> ForSome | None:
    return None if scores is None else (scores[0], _to_host([scores[1]])[0])


def _by_token(scores: ForSome | None) -> dict[int, np.ndarray]:
    """Copies by sampled token: a view would keep the whole step's pinned memory."""
    if scores is None:
        return {}
    return {place: scores[1][index].numpy().copy() for index, place in enumerate(scores[0].tolist())}


def _to_host(columns: list[torch.Tensor]) -> list[torch.Tensor]:
    return [
        torch.empty(column.shape, dtype=column.dtype, pin_memory=True).copy_(column, non_blocking=True)
        if column.is_cuda
        else column
        for column in columns
    ]
