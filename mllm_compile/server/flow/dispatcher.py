"""Hands the engine's news to the running requests, all of a step at once, in one call of the event loop."""

from __future__ import annotations

import array
import itertools
import logging
import time
from collections.abc import Callable, Iterable

from mllm_compile.engine.sessions import Session
from mllm_compile.errors import MllmError
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.server.api.errors import ApiError, bad_request, of_error, of_kind, timed_out
from mllm_compile.server.flow.choice import Choice, PromptRun
from mllm_compile.server.flow.job import Job
from mllm_compile.server.wire import messages
from mllm_compile.server.wire.messages import Abort, AdapterCard, Command, End, Media, StepRest, Submit

logger = logging.getLogger("mllm_compile.server")

ABORTED = "aborted"
COMMENT_S = 15.0  # a stream that waits says so as often: proxies close what is silent
SLOW_S = 60.0  # a reader that takes nothing for so long is given up


class Dispatcher:
    """The running requests of the front.

    Args:
        send: sends a command to the engine.
        on_admitted: called for each prompt that does not wait any more, because it runs or has ended.
        gives_aborted: what the engine has ended is an answer with the tokens that there are, and no error.
    """

    def __init__(
        self, send: Callable[[Command], None], on_admitted: Callable[[], None], *, gives_aborted: bool = False
    ) -> None:
        self._gives_aborted = gives_aborted
        self._version: str | None = None  # of the engine's weights; None: nobody has named them
        self._send = send
        self._on_admitted = on_admitted
        self._keys = itertools.count()
        self._runs: dict[int, tuple[Job, PromptRun]] = {}  # by key, until the engine has told the end
        self._by_row: dict[int, tuple[Job, Choice]] = {}
        self.jobs: dict[str, Job] = {}  # by name, until they are over

    @property
    def is_idle(self) -> bool:
        return not self.jobs

    def num_running(self) -> int:
        """Completions that have a row, and have not ended."""
        started = (prompt for _, prompt in self._runs.values() if not prompt.is_waiting)
        return sum(c.was_admitted and c.finish_reason is None for prompt in started for c in prompt.choices)

    def next_key(self) -> int:
        """A number for a prompt."""
        return next(self._keys)

    def start(
        self,
        job: Job,
        params: SamplingParams,
        priority: int,
        cache_salt: str | None,
        adapter: AdapterCard | None = None,
        session: Session | None = None,
    ) -> None:
        """Hands a job's prompts to the engine."""
        self.jobs[job.name] = job
        fields = messages.params_to_wire(params)
        if params.n == 1:
            fields.pop("stop", None)  # found here, where the text is made
        for index, prompt in enumerate(job.prompts):
            name = job.name if len(job.prompts) == 1 else f"{job.name}-{index}"
            self._runs[prompt.key] = (job, prompt)
            ids = array.array("i", prompt.token_ids).tobytes()
            submit = Submit(prompt.key, name, ids, fields, priority, cache_salt)
            if prompt.media is not None:
                submit.media = Media(prompt.media.segment, prompt.media.is_feature, prompt.media.items)
            if adapter is not None:
                submit.adapter = (adapter.name, adapter.version)
            if session is not None:
                submit.session = (session.id, session.retention, session.is_one_line)
            if prompt.decoder_ids is not None:
                submit.decoder_prompt = array.array("i", prompt.decoder_ids).tobytes()
            submit.window, prompt.window = prompt.window, None
            self._send(submit)

    def cancel(self, job: Job, prompts: Iterable[PromptRun]) -> None:
        """Forgets a job that is over; the engine is told of what it still computes."""
        self.jobs.pop(job.name, None)
        for prompt in prompts:
            self._no_longer_waits(prompt)
            if prompt.media is not None:
                prompt.media.remove()
            if self._runs.pop(prompt.key, None) is not None:
                self._send(Abort(prompt.key))

    def abort(self, names: Iterable[str]) -> list[str]:
        """Ends requests by name; returns those that were there."""
        found = [name for name in dict.fromkeys(names) if name in self.jobs]
        for name in found:
            self.jobs[name].fail(bad_request("the request was aborted", param="request_id", code=ABORTED))
        return found

    def end_aborted(self, names: Iterable[str] | None) -> list[str]:
        """Ends requests by name, or all, each with the tokens that it has; returns those that were there."""
        found = [name for name in dict.fromkeys(self.jobs if names is None else names) if name in self.jobs]
        for name in found:
            job = self.jobs[name]
            for choice in job.choices:
                self._end(job, choice, "abort", None)
        return found

    def fail_all(self, error: ApiError) -> None:
        """Ends all requests with an error, as the engine is gone."""
        self._by_row.clear()
        self._runs.clear()
        self._version = None
        self.end_all(error)

    def end_all(self, error: ApiError) -> None:
        """Ends all requests with an error; an engine that has them is told."""
        for job in list(self.jobs.values()):
            job.fail(error)

    def on_step(self, frame: bytes) -> None:
        """Takes the news of a step."""
        rows, tokens, rest = messages.decode_step(frame)
        by_row = self._by_row
        scores = {}
        if rest is not None:
            self._begin_rest(rest)
            scores = dict(rest.scores)
        touched: list[tuple[Job, Choice]] = []
        now = time.monotonic()
        for row, token in zip(rows, tokens, strict=True):
            place = by_row.get(row)
            if place is None:
                continue
            job, choice = place
            if choice.finish_reason is not None:  # a stop text has ended it, or its client
                continue
            try:
                choice.take(token, scores.get(row))
            except Exception as error:  # of the tokenizer; the other requests are not hurt by it
                _break(job, error)
                continue
            job.last_token_s = now
            job.num_steps += 1
            touched.append(place)
        for job, choice in touched:
            if job.first_token_s is None:
                job.first_token_s = now
            try:
                if choice.finish_reason is not None:
                    self._cut(job, choice)
                elif not choice.is_ending:
                    job.news(choice)
            except Exception as error:
                _break(job, error)
        if rest is not None:
            self._end_rest(rest)

    def _begin_rest(self, rest: StepRest) -> None:
        """Takes the events that must come before the step's tokens."""
        if rest.version is not None:
            self._version = rest.version
            for _, choice in self._by_row.values():
                choice.has_version(rest.version)
        for admitted in rest.admitted:
            if admitted.key in self._runs:
                job, prompt = self._runs[admitted.key]
                choice = prompt.choices[admitted.index]
                if self._version is not None:
                    choice.has_version(self._version)
                self._by_row[admitted.row] = (job, choice)
                job.admitted(choice, admitted)
                self._no_longer_waits(prompt)
        for row, num_drafted, num_accepted in rest.drafts:
            if row in self._by_row:
                self._by_row[row][0].drafted(num_drafted, num_accepted)
        for key, prompt_scores in rest.prompt_scores:
            if key in self._runs:
                self._runs[key][1].scores = prompt_scores
        for key, transfer in rest.transfers:
            if key in self._runs:
                self._runs[key][1].kv_transfer_params = transfer
        for key, index, data, shape in rest.experts:
            if key in self._runs:
                self._runs[key][1].choices[index].experts = (data, shape)
        for key, index, reason, stop_reason in rest.finished:
            if key in self._runs:
                self._runs[key][1].choices[index].will_end(reason, stop_reason)

    def _end_rest(self, rest: StepRest) -> None:
        runs = self._runs
        # First, as what the engine has ended needs no Abort.
        ended = {end.key: runs.pop(end.key) for end in rest.ended if end.key in runs}
        for key, index, reason, stop_reason in rest.finished:
            run = ended.get(key) or runs.get(key)
            if run is not None and not run[0].is_over:
                self._end(run[0], run[1].choices[index], reason, stop_reason)
        for end in rest.ended:
            if end.key in ended:
                self._end_run(*ended[end.key], end)

    def _end_run(self, job: Job, prompt: PromptRun, end: End) -> None:
        self._no_longer_waits(prompt)
        if job.is_over:
            return
        if end.error is not None:
            error = of_kind(end.error_kind, end.error)
            if error.param == "structured_outputs":  # the engine's name of the form
                error.param = job.form_field
            job.fail(error)
            return
        for choice, (reason, stop_reason) in zip(prompt.choices, end.reasons, strict=True):
            if choice.finish_reason is None and reason == "abort" and not self._gives_aborted:
                job.fail(ApiError(503, "the server has ended the request", code=ABORTED))
                return
            self._end(job, choice, reason, stop_reason)

    def _end(self, job: Job, choice: Choice, reason: str, stop_reason: messages.StopReason) -> None:
        if choice.finish_reason is not None:
            return
        try:
            choice.end(reason, stop_reason)
            job.news(choice)
            job.choice_ended()
        except Exception as error:
            _break(job, error)

    def _cut(self, job: Job, choice: Choice) -> None:
        """Ends a completion at a stop text that was found here; one of several the engine finds by itself."""
        prompt = choice.prompt
        if len(prompt.choices) == 1 and self._runs.pop(prompt.key, None) is not None:
            self._send(Abort(prompt.key))
        job.news(choice)
        job.choice_ended()

    def _no_longer_waits(self, prompt: PromptRun) -> None:
        if prompt.is_waiting:
            prompt.is_waiting = False
            self._on_admitted()

    def sweep(self, max_queue_s: float | None, timeout_s: float | None) -> None:
        """Ends requests that wait too long; called every half second."""
        now = time.monotonic()
        for position, job in enumerate(list(self.jobs.values())):
            try:
                _look_after(job, position, now, max_queue_s, timeout_s)
            except Exception as error:  # others still wait, and are looked after as well
                _break(job, error)


def _look_after(job: Job, position: int, now: float, max_queue_s: float | None, timeout_s: float | None) -> None:
    age = now - job.arrived_s
    if timeout_s is not None and age > timeout_s:
        job.fail(timed_out(timeout_s))
    elif max_queue_s is not None and job.is_waiting and age > max_queue_s:
        message = f"the request has waited for more than {max_queue_s:g} s. Ask again later."
        job.fail(ApiError(429, message, code="queue_timeout", retry_after_s=int(max_queue_s) + 1))
    elif job.writer.busy_since is not None and now - job.writer.busy_since > SLOW_S:
        job.leave()
    elif job.is_stream and now - job.last_sent_s > COMMENT_S and not job.writer.is_busy:
        job.comment(f"waiting, {position} ahead" if job.is_waiting else "working", now)


def _break(job: Job, error: Exception) -> None:
    """Ends a request whose news cannot be told."""
    if isinstance(error, MllmError):
        logger.warning("request %s: %s", job.name, error)
        job.fail(of_error(error, None))
    else:
        logger.error("request %s met an internal error", job.name, exc_info=error)
        job.fail(ApiError(500, "internal error; the server's log has it", code="internal_error"))
