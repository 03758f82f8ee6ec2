"""The requests that an engine holds, from their admission to their end: what the scheduler has, and who is told.

A prompt with several completions has its first one computed before its siblings, so that they find its KV in the
prefix cache. A request with an adapter is scheduled when that is on the device. Read next: sequences.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from mllm_compile.engine.cache_salt import at_epoch
from mllm_compile.engine.core import end_errors
from mllm_compile.engine.outputs import FinishReason
from mllm_compile.engine.sequences import Sequence, Submission
from mllm_compile.engine.stats import StatsRecorder
from mllm_compile.errors import MllmError, RequestError
from mllm_compile.runtime.schedule.data_parallel import DataParallelScheduler
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch, UpdateResult
from mllm_compile.runtime.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from mllm_compile.engine.core.adapter_queue import AdapterParts, AdapterQueue

logger = logging.getLogger("mllm_compile.engine")


class LiveRequests:
    """Used by the engine's thread alone, but for `arrive`.

    Args:
        scheduler: its requests are these.
        recorder: counts their ends.
        post: has the engine's thread run a command; from any thread.
        adapters: the device's side of adapters; None: no request has one.

    Attributes:
        adapters: the requests that wait for their adapters; None without any.
    """

    def __init__(
        self,
        scheduler: Scheduler | DataParallelScheduler,
        recorder: StatsRecorder,
        post: Callable[[Callable[[], None]], None],
        adapters: AdapterParts | None,
    ) -> None:
        self._scheduler = scheduler
        self._recorder = recorder
        self._unanswered: set[Submission] = set()  # taken, and not yet told their end
        self._submissions: dict[str, Submission] = {}
        self._live: dict[Request, Sequence] = {}  # what the scheduler holds
        self._watched: dict[Request, Sequence] = {}  # running requests whose every token matters
        # First of several completions of a prompt: its siblings wait until its KV is in the prefix cache.
        self._leaders: dict[Request, Submission] = {}
        self.adapters = None if adapters is None else self._adapter_queue(adapters, post)
        self._epoch = 0  # of the prefixes that new requests may share
        self._version: str | None = None

    def _adapter_queue(self, parts: AdapterParts, post: Callable[[Callable[[], None]], None]) -> AdapterQueue:
        from mllm_compile.engine.core.adapter_queue import AdapterQueue  # an engine without adapters does not import it

        return AdapterQueue(parts, post, self._schedule, self.fail)

    # --- from admission on --------------------------------------------------------------------------------------------

    def arrive(self, submissions: Iterable[Submission]) -> None:
        """Notes submissions that `admit` follows for; from any thread, one at a time."""
        self._unanswered.update(submissions)

    def admit(self, submissions: Iterable[Submission]) -> None:
        """Queues submissions; one whose id is in use is refused."""
        for submission in submissions:
            if submission.request_id in self._submissions:
                message = f"request id {submission.request_id!r} is in use; give each live request an id of its own"
                submission.refuse(RequestError(message))
                self._unanswered.discard(submission)
            else:
                self._submissions[submission.request_id] = submission
                self._add_first(submission)

    def _add_first(self, submission: Submission) -> None:
        """Queues the completions of a new submission, siblings later where they can share the first one's prompt.

        No more of them at once than can run: a later request waits for these, not for all that were asked for.
        """
        config = self._scheduler.config
        shares = config.enable_prefix_cache and len(submission.prompt_token_ids) > config.page_size
        if len(submission.sequences) > 1 and shares:
            self._leaders[submission.sequences[0].request] = submission
            self._queue(submission, 1)
        else:
            self._queue(submission, config.max_running_requests)

    def _queue(self, submission: Submission, count: int) -> None:
        """Queues up to `count` more of its completions."""
        for _ in range(min(count, len(submission.unqueued))):
            if submission.unqueued:  # else it failed with one of them
                self._add(submission.unqueued.popleft())

    def _add(self, sequence: Sequence) -> None:
        adapter = sequence.submission.adapter
        if adapter is None or self.adapters is None:
            self._schedule(sequence)
        else:
            self.adapters.take(adapter, sequence)

    def _schedule(self, sequence: Sequence) -> None:
        request = sequence.request
        if self._epoch:
            request.cache_salt = at_epoch(request.cache_salt, self._epoch)
        if self._version is not None:
            sequence.versions = [(0, self._version)]
        try:
            self._scheduler.add(request)
        except RequestError as error:
            self.fail(sequence.submission, error)
            return
        self._live[request] = sequence
        if sequence.is_watched:
            self._watched[request] = sequence

    # --- other weights ------------------------------------------------------------------------------------------------

    @property
    def are_none(self) -> bool:
        """True if all that came have been told their end."""
        return not self._unanswered

    @property
    def ids(self) -> list[str]:
        """The ids of all that were admitted."""
        return list(self._submissions)

    def weights_changed(self, epoch: int) -> None:
        """Keeps prefixes of new weights apart: with no step in flight.

        Args:
            epoch: as at_epoch has it.
        """
        self._epoch = epoch
        for request in self._live:
            request.weights_changed(at_epoch(request.cache_salt, epoch))

    def label(self, version: str, before: str) -> None:
        """Tokens from here on are of a version of the weights, those there are of the one before."""
        self._version = version
        self._scheduler.weights_changed()
        for request, sequence in self._live.items():
            if sequence.versions is None:
                sequence.versions = [(0, before)]
            sequence.versions.append((len(request.output_token_ids), version))

    def retract(self, *, flushes: bool = False) -> None:
        """Has all that run computed anew, with no step in flight; `flushes`: nothing of it from the prefix cache."""
        self._scheduler.retract()
        if flushes:
            self._scheduler.flush_prefix_cache()

    def drop_kv(self) -> None:
        """Has all that run computed anew, and forgets cached prefixes: with no step in flight."""
        self._scheduler.drop_kv()

    # --- the tokens of a step -----------------------------------------------------------------------------------------

    def take(self, batch: ScheduledBatch, result: UpdateResult) -> None:
        """Tells those that wait for them of a step's tokens and ends.

        Args:
            result: `counts` is made less by tokens that are dropped behind a stop string.
        """
        for request in result.broken:
            self._break(request)
        if self._leaders:
            self._release_siblings(batch, result.accepted)
        if self._watched:
            for index, row in enumerate(result.accepted):
                sequence = self._watched.get(batch.requests[row])
                if sequence is not None:
                    num_dropped = self._advance(sequence)
                    if num_dropped and result.counts is not None:
                        result.counts[index] -= num_dropped
        for request in result.finished:
            sequence = self._live.get(request)
            if sequence is not None:  # not watched, else it is gone already
                sequence.end()
                self._forget(sequence)

    def _break(self, request: Request) -> None:
        """Fails the submission of a request that the scheduler ended because it has no next token."""
        if request.is_broken:
            self._recorder.logits_were_no_numbers()
        sequence = self._live.get(request)
        if sequence is not None:
            failure = end_errors.no_token(request)
            logger.log(
                logging.ERROR if request.is_broken else logging.INFO, "request %s: %s", request.request_id, failure
            )
            self.fail(sequence.submission, failure)

    def _release_siblings(self, batch: ScheduledBatch, accepted: list[int]) -> None:
        """Queues the siblings of every first completion that has its first token: the prompt's KV is cached before
        they are scheduled."""
        for row in accepted:
            submission = self._leaders.pop(batch.requests[row], None)
            if submission is not None:
                self._queue(submission, self._scheduler.config.max_running_requests - 1)

    def _advance(self, sequence: Sequence) -> int:
        """Looks at a watched sequence's new tokens; how many were dropped behind a stop string."""
        num_tokens = len(sequence.request.output_token_ids)
        try:
            stop_string = sequence.advance()
        except Exception as error:  # a fault of the tokenizer; the other requests are not hurt by it
            failure = end_errors.no_text(error)
            logger.warning("request %s: %s", sequence.request.request_id, failure)
            self.fail(sequence.submission, failure)
            return 0
        if stop_string is not None:
            self._scheduler.end_at(sequence.request, sequence.num_taken, stop_string)
        if sequence.finish_reason is not None:
            self._forget(sequence)
        return num_tokens - len(sequence.request.output_token_ids)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests with "abort"; ids that are not there are passed over."""
        for request_id in request_ids:
            submission = self._submissions.get(request_id)
            if submission is not None:
                self._end_submission(submission, "abort")

    def withdraw(self, submissions: Iterable[Submission]) -> None:
        """Aborts these submissions, never another one that has the same id."""
        for submission in submissions:
            if self._submissions.get(submission.request_id) is submission:
                self._end_submission(submission, "abort")

    def abort_all(self) -> None:
        """Ends all that were admitted with "abort"."""
        self.abort(list(self._submissions))

    def fail(self, submission: Submission, error: MllmError) -> None:
        """Ends a submission with an error."""
        submission.failure = error
        self._end_submission(submission, "error")

    def fail_requests(self, requests: Iterable[Request], error: MllmError) -> None:
        """Ends the submissions of requests that the scheduler has let go."""
        for request in requests:
            sequence = self._live.get(request)
            if sequence is not None:
                self.fail(sequence.submission, error)

    def tell_all(self, error: MllmError) -> None:
        """Gives `error` to all that still wait, whatever fails on the way; may be repeated."""
        for submission in list(self._unanswered):
            with suppress(BaseException):
                self.fail(submission, error)
            submission.engine_ended(error)  # for what could not be told as it should be
            self._unanswered.discard(submission)

    def _end_submission(self, submission: Submission, reason: FinishReason) -> None:
        """Ends every completion that still runs."""
        submission.unqueued.clear()
        for sequence in submission.sequences:
            if sequence.finish_reason is None:
                if sequence.request in self._live:  # else it was not queued yet
                    self._scheduler.abort(sequence.request)
                sequence.end(reason)
                self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        """Forgets a completion whose end was told."""
        request, submission = sequence.request, sequence.submission
        self._live.pop(request, None)
        self._watched.pop(request, None)
        self._leaders.pop(request, None)
        self._recorder.completion_ended(sequence.finish_reason or "error")
        self._queue(submission, 1)
        if submission.adapter is not None and self.adapters is not None:
            self.adapters.leave(sequence)  # behind its sibling, which finds the adapter where it is
        if submission.is_finished:
            self._unanswered.discard(submission)
            if self._submissions.get(submission.request_id) is submission:
                del self._submissions[submission.request_id]
