"""Gives the tokens of a step to its requests, and ends those that they complete (lifecycle.py). Free of torch."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from mllm_compile.runtime.sampling.params import NO_TOKEN
from mllm_compile.runtime.schedule.lifecycle import Lifecycle
from mllm_compile.runtime.schedule.request import Request, RequestStatus
from mllm_compile.runtime.schedule.rows import Rows
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch, TokenRuns, UpdateResult


class SampledTokens:
    """See the module's header. For the scheduler's thread.

    Args:
        rows: their computed tokens are corrected where drafts were rejected.
        lifecycle: ends requests, and has those computed anew whose draft left NaN.
    """

    def __init__(self, rows: Rows, lifecycle: Lifecycle) -> None:
        self._rows, self._lifecycle = rows, lifecycle

    def take(self, batch: ScheduledBatch, token_ids: np.ndarray, broken_rows: Sequence[int]) -> UpdateResult:
        """Take a step's tokens, one a row at most; arguments as Scheduler.update's."""
        broken = [
            request
            for row in broken_rows
            if self._lifecycle.end_broken(request := batch.requests[row], int(token_ids[row]))
        ]
        accepted: list[int] = []
        ended: list[tuple[Request, int]] = []
        now = time.monotonic()
        # Tokens wait for this loop over all requests of the step: members of a class are looked up before it.
        status_running, status_finished = RequestStatus.RUNNING, RequestStatus.FINISHED
        columns = zip(
            range(batch.num_requests),
            batch.requests,
            token_ids.tolist(),
            batch.seq_lens.tolist(),
            batch.sample_mask.tolist(),
            strict=True,
        )
        for row, request, token, num_written, sampled in columns:
            status = request.status
            if status is status_finished:
                continue
            if status is status_running:
                request.num_computed_tokens = num_written
            if not sampled:
                continue
            accepted.append(row)
            output = request.output_token_ids
            output.append(token)
            request.last_token_time = now
            num_output = len(output)
            if num_output == 1:
                request.first_token_time = now
            if num_output >= request.max_new_tokens or token in request.stop_ids:
                ended.append((request, token))
        finished = [request for request, token in ended if self._end_if_due(request, token)]
        return UpdateResult(accepted=accepted, finished=finished, broken=broken)

    def take_runs(
        self, batch: ScheduledBatch, token_ids: np.ndarray, runs: TokenRuns, broken_rows: set[int]
    ) -> UpdateResult:
        """Take the tokens of a verify step: each row's up to the one that ends its request."""
        counts: list[int] = []
        result = UpdateResult(accepted=[], finished=[], broken=[], counts=counts, num_drafted=runs.num_drafted)
        now = time.monotonic()
        for row, request in enumerate(batch.requests):
            if request.is_finished:
                continue
            if batch.device_lens is not None and request.status is not RequestStatus.RUNNING:
                continue  # preempted for what the step before drafted: these tokens are behind it
            run = runs.token_ids[row, : runs.counts[row]].tolist()
            if row in broken_rows or (runs.broken_drafts[row] and run[-1] == NO_TOKEN):
                del run[-1:]
            count = self._take_run(request, run, now)
            num_written = int(batch.prefix_lens[row]) + int(batch.num_new[row])
            if row < batch.num_decodes:
                num_written = self._settle_decode(batch, row, count, int(runs.num_drafted[row]))
            request.num_computed_tokens = num_written
            if count:
                result.accepted.append(row)
                counts.append(count)
            if request.is_finished:
                result.finished.append(request)
            elif row in broken_rows:
                self._lifecycle.end_broken(request, int(token_ids[row]))
                result.broken.append(request)
            elif runs.broken_drafts[row]:
                self._lifecycle.compute_anew(request)
        return result

    def _take_run(self, request: Request, tokens: Sequence[int], now: float) -> int:
        """Append tokens up to the one that ends the request; how many that are."""
        output = request.output_token_ids
        for count, token in enumerate(tokens, start=1):
            output.append(token)
            request.last_token_time = now
            if request.first_token_time is None:
                request.first_token_time = now
            is_end = len(output) >= request.max_new_tokens or token in request.stop_ids
            if is_end and self._end_if_due(request, token):
                return count
        return len(tokens)

    def _settle_decode(self, batch: ScheduledBatch, row: int, count: int, num_drafted: int) -> int:
        """Correct the length of a decode that got `count` tokens; its tokens with KV. Those behind were drafted in
        vain."""
        request, num_kept = batch.requests[row], max(count, 1)
        prefix_len = int(batch.prefix_lens[row]) if batch.device_lens is None else request.num_computed_tokens
        num_written = prefix_len + num_kept
        self._rows.computed[request.row] -= int(batch.num_new[row]) - num_kept
        request.num_drafted_tokens += num_drafted
        request.num_accepted_tokens += min(max(count - 1, 0), num_drafted)
        return num_written

    def _end_if_due(self, request: Request, token: int) -> bool:
        """End the request if its newest token is due to; True if so. A stop token counts only from min_tokens on.

        Unless a grammar is complete with it: that allows end-of-sequence earlier where it allows nothing else.
        """
        count = len(request.output_token_ids)
        is_eos = token in request.eos_token_ids and not request.params.ignore_eos
        is_complete = request.grammar is not None and is_eos
        if token in request.stop_ids and (count >= request.params.min_tokens or is_complete):
            self._lifecycle.end(request, "stop", None if is_eos else token)
        elif count >= request.max_new_tokens:
            self._lifecycle.end(request, "length", None)
        else:
            return False
        return True
