"""The events of every step for the front: what the engine's thread notes, and sends once a step.

StepEvents is the sink of all requests and of the steps (engine/sequences.py). Plain requests cost nothing here one by
one: a step's rows and tokens are two arrays. Only requests that are admitted, end, or want log-probabilities are looked
    at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mllm_compile.engine.sequences import Delta, Submission
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.server.wire import messages
from mllm_compile.server.wire.messages import Admitted, Scores, StepRest

if TYPE_CHECKING:
    from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch, TokenRuns, UpdateResult
    from mllm_compile.runtime.step.output import StepOutput, TokenScores


class StepEvents:
    """Notes and sends; `take` is for the threads that submit, the rest for the engine's.

    Args:
        send: sends a frame without waiting.
        version: gives the label of the engine's weights, which changes between two steps.
    """

    def __init__(self, send: Callable[[bytes], None], version: Callable[[], str]) -> None:
        self._send = send
        self._version, self._told_version = version, version()
        self._places: dict[Request, tuple[int, int]] = {}  # key and index of each completion
        self._scored: set[Request] = set()  # those that want log-probabilities
        self._keys: dict[Submission, int] = {}
        self._live: dict[int, Submission] = {}  # the same by key
        self._rest = StepRest()
        self._rows = self._tokens = b""
        self._has_step = False

    def take(self, key: int, submission: Submission) -> None:
        """Makes this the sink of a submission that will be handed in next."""
        self._keys[submission] = key
        self._live[key] = submission
        for sequence in submission.sequences:
            params = sequence.request.params
            self._places[sequence.request] = (key, sequence.index)
            if params.logprobs is not None or params.prompt_logprobs is not None:
                self._scored.add(sequence.request)
        submission.sink = self

    def give_back(self, submission: Submission) -> None:
        """Forgets a submission that the engine did not take."""
        self._live.pop(self._keys.pop(submission), None)
        for sequence in submission.sequences:
            self._places.pop(sequence.request, None)
            self._scored.discard(sequence.request)

    def submission_of(self, key: int) -> Submission | None:
        """The submission of that number, None after its end."""
        return self._live.get(key)

    def on_step(self, batch: ScheduledBatch, output: StepOutput, result: UpdateResult) -> None:
        if self._has_step:
            self.flush()
        self._has_step = True
        if (newest := self._version()) != self._told_version:
            self._rest.version = self._told_version = newest
        if batch.admitted:
            self._note_admitted(batch)
        if output.runs is not None and result.counts is not None:
            self._note_runs(batch, output.runs, result, np.array(result.counts, dtype=np.intp))
            return
        accepted = np.array(result.accepted, dtype=np.intp)
        self._rows = batch.rows[accepted].tobytes()
        self._tokens = output.token_ids[accepted].astype(np.int32).tobytes()
        if self._scored:
            self._note_scores(batch, result.accepted)
        for request in result.finished:
            self._note_end(request)

    def _note_runs(self, batch: ScheduledBatch, runs: TokenRuns, result: UpdateResult, counts: np.ndarray) -> None:
        """Tells a verify step as several steps of a token each: only the last one is not sent yet."""
        rows = np.array(result.accepted, dtype=np.intp)
        self._note_drafts(batch, runs, rows, counts)
        ends = {request: batch.requests.index(request) for request in result.finished}
        for place in range(int(counts.max(initial=1))):
            if place:
                self.flush()
                self._has_step = True
            accepted = rows[counts > place]
            self._rows = batch.rows[accepted].tobytes()
            self._tokens = runs.token_ids[accepted, place].astype(np.int32).tobytes()
            if self._scored:
                self._note_scores(batch, accepted.tolist(), (counts[counts > place] - place).tolist())
            over = set(rows[counts == place + 1].tolist())
            for request, row in ends.items():
                if row in over:
                    self._note_end(request)

    def _note_drafts(self, batch: ScheduledBatch, runs: TokenRuns, rows: np.ndarray, counts: np.ndarray) -> None:
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            num_drafted = int(runs.num_drafted[row])
            if row < batch.num_decodes and num_drafted:
                self._rest.drafts.append((int(batch.rows[row]), num_drafted, count - 1))

    def _note_end(self, request: Request) -> None:
        place = self._places.get(request)
        if place is not None:
            self._rest.finished.append((*place, request.finish_reason or "stop", request.stop_reason))
            if request.kv_transfer is not None:
                self._rest.transfers.append((place[0], request.kv_transfer.to_wire()))
            if request.routed_experts is not None:
                experts = request.routed_experts
                self._rest.experts.append((*place, experts.tobytes(), list(experts.shape)))

    def _note_admitted(self, batch: ScheduledBatch) -> None:
        admitted = set(batch.admitted)
        for index in range(batch.num_decodes, batch.num_requests):
            request = batch.requests[index]
            place = self._places.get(request) if request in admitted else None
            if place is not None:
                scheduled = request.scheduled_time or 0.0
                admitted_to = Admitted(*place, int(batch.rows[index]), request.num_cached_tokens, scheduled)
                admitted_to.host_tokens, admitted_to.disk_tokens = request.host_tokens, request.disk_tokens
                self._rest.admitted.append(admitted_to)

    def _note_scores(self, batch: ScheduledBatch, accepted: list[int], newest: list[int] | None = None) -> None:
        """Args: newest: which of the last scores of each are told; None: the last."""
        for index, back in zip(accepted, newest or [1] * len(accepted), strict=True):
            request = batch.requests[index]
            if request not in self._scored:
                continue
            if request.params.logprobs is not None:
                self._rest.scores.append((int(batch.rows[index]), _scores(request.output_logprobs[-back])))
            if request.params.prompt_logprobs is not None and len(request.output_token_ids) == 1:
                entries = [_scores(entry) for entry in request.prompt_logprobs]
                self._rest.prompt_scores.append((self._places[request][0], entries))

    def on_delta(self, submission: Submission, delta: Delta) -> None:
        raise RuntimeError("internal error: a served request is told once a step, not by itself")

    def on_end(self, submission: Submission) -> None:
        key = self._keys.get(submission)
        if key is None:
            return
        self.give_back(submission)
        reasons = [(sequence.finish_reason or "error", sequence.stop_reason) for sequence in submission.sequences]
        self._rest.ended.append(messages.end_of(key, reasons, submission.failure))

    def flush(self) -> None:
        rest = self._rest
        if self._has_step or not rest.is_empty():
            self._send(messages.encode_step(self._rows, self._tokens, rest))
            if not rest.is_empty():
                self._rest = StepRest()
            self._rows = self._tokens = b""
            self._has_step = False


def _scores(scores: TokenScores) -> Scores:
    kept = None if scores.kept is None else scores.kept.tobytes()
    return Scores(scores.token_id, scores.logprob, scores.rank, list(scores.top), kept)
