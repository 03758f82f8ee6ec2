"""The engine's one thread: takes requests in, runs steps, hands tokens out.

EngineCore owns the scheduler and the step runner; only its thread touches them while it runs. Callers put commands
into an inbox; the thread takes them between two steps. Overlap: step n+1 is scheduled and launched before the wait
for step n's tokens, so the device is not idle while the host works. Free of torch: any StepSubmitter will do.

When a step fails, its requests end with an error and their pages come back. The others go on if the device still
answers; else the engine is dead and says why. However the thread ends, all waiting callers are told. Read next:
runtime/schedule/scheduler.py, sequences.py.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from mllm_compile.engine import end_errors
from mllm_compile.engine.outputs import FinishReason
from mllm_compile.engine.sequences import Sequence, StepSink, Submission
from mllm_compile.engine.stats import EngineStats, ExpertsSource, ForwardTimesSource, StatsRecorder
from mllm_compile.errors import EngineDeadError, MllmError, RequestError
from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.data_parallel import DataParallelScheduler
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch, UpdateResult
from mllm_compile.runtime.schedule.scheduler import Scheduler
from mllm_compile.runtime.step.output import StepOutput

if TYPE_CHECKING:
    from mllm_compile.adapters.peft_folder import Matrices
    from mllm_compile.adapters.registry import Adapter
    from mllm_compile.engine.adapter_queue import AdapterParts, AdapterQueue

logger = logging.getLogger("mllm_compile.engine")

T = TypeVar("T")

_TRIES = 3  # to tell all callers that the engine has ended
_IDLE_GRACE_S = 1e-3  # grace period before idle work
_CLOSED_POLL_S = 1.0  # how often an idle engine checks whether it was closed


def _nothing() -> None:
    """The default of an optional callback."""


class StepHandle(Protocol):
    """A step that was launched."""

    def wait(self) -> StepOutput:
        """Blocks until its tokens are on the host; raises the device's errors."""


class StepSubmitter(Protocol):
    """Runs steps in the order in which they are submitted; runtime/step/runner.py has the real one."""

    def submit(self, batch: ScheduledBatch) -> StepHandle:
        """Launches a step without waiting for it, nor for the one before.

        Raises:
            DeviceMemoryError: it does not fit; it has not happened, and later steps can.
        """


@dataclass(frozen=True, slots=True)
class _Step:
    batch: ScheduledBatch
    handle: StepHandle
    launched: float  # time.monotonic() before its launch


class _Call(Generic[T]):
    """A function that the engine's thread runs for another thread."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self.future: Future[T] = Future()

    def __call__(self) -> None:
        if self.future.done():  # the thread ended right after it
            return
        try:
            self.future.set_result(self._function())
        except Exception as error:  # the caller gets it from the future
            self.future.set_exception(error)
        except BaseException as fault:  # it is the thread's end
            self.future.set_exception(end_errors.stopped(fault))
            raise


class EngineCore:
    """Runs requests to their end; `submit`, `abort`, `stats`, `flush_prefix_cache` and `close` from any thread.

    `start` comes first. Register `close` before calling it, so an interrupted start leaves nothing behind.

    Args:
        scheduler: not used by anyone else from now on.
        step_runner: likewise.
        check_device: raises when the device cannot be used any more; asked after a step has failed.
        check_idle: raises when no step could run any more; called each idle second.
        shutdown: gives the device's memory back; called once, by `close`, after the last step.
        prepare_thread: called first on the engine's thread.
        forward_times: gives (num_tokens, count, median in ms) rows, for the figures.
        experts_chosen: gives each layer's counts by expert, likewise.
        snapshot_bytes: what the state of a cached prefix takes, likewise.
        log_interval_s: seconds between two log lines with figures while there is work; 0 for none.
        adapters: the device's side of adapters; None: no request has one.
    """

    def __init__(
        self,
        scheduler: Scheduler | DataParallelScheduler,
        step_runner: StepSubmitter,
        *,
        check_device: Callable[[], None] = _nothing,
        check_idle: Callable[[], None] = _nothing,
        shutdown: Callable[[], None] = _nothing,
        prepare_thread: Callable[[], None] = _nothing,
        forward_times: ForwardTimesSource = tuple,
        experts_chosen: ExpertsSource = dict,
        snapshot_bytes: int = 0,
        log_interval_s: float = 10.0,
        adapters: AdapterParts | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._check_device = check_device
        self._check_idle = check_idle
        self._prepare_thread = prepare_thread
        self._shutdown = shutdown
        self._log_interval_s = log_interval_s
        self._next_log = time.monotonic() + log_interval_s
        self._has_news = False  # a step was finished since the last line of the log
        num_rows = scheduler.config.max_running_requests + 1
        self._recorder = StatsRecorder(num_rows, forward_times, experts_chosen, snapshot_bytes)

        self._condition = threading.Condition()
        self._inbox: list[Callable[[], None]] = []  # guarded by the condition, as is _end_error
        self._end_error: EngineDeadError | None = None  # set once: no step will run after it
        self._unanswered: set[Submission] = set()  # taken, and not yet told their end
        self._is_closing = False
        self._giving_back = threading.RLock()
        self._closes_itself = False  # `close` was called on the engine's own thread
        self._is_forked = False  # this is a forked process, which has no such thread

        # Used by the engine's thread alone.
        self._commands: deque[Callable[[], None]] = deque()  # taken out of the inbox; the first may be half done
        self._in_flight: _Step | None = None
        # time.monotonic() when the tokens of the last step came, or when there was work again after that.
        self._busy_since = 0.0
        # The last step, its result, and when its tokens came.
        self._uncounted: tuple[ScheduledBatch, UpdateResult, float] | None = None
        self._submissions: dict[str, Submission] = {}
        self._live: dict[Request, Sequence] = {}  # what the scheduler holds
        self._watched: dict[Request, Sequence] = {}  # running requests whose every token matters
        # First of several completions of a prompt: its siblings wait until its KV is in the prefix cache.
        self._leaders: dict[Request, Submission] = {}

        self._adapters = None if adapters is None else self._adapter_queue(adapters)
        self._step_sink: StepSink | None = None
        self._stopped_unseen = end_errors.stopped_unseen()

        # Only the thread holds the step runner: what it has on the device goes when the thread ends.
        self._thread = threading.Thread(target=self._run, args=(step_runner,), name="mllm-engine", daemon=True)
        _cores.add(self)

    def _adapter_queue(self, parts: AdapterParts) -> AdapterQueue:
        from mllm_compile.engine.adapter_queue import AdapterQueue

        return AdapterQueue(parts, self._post_if_alive, self._schedule, self._fail)

    def start(self) -> None:
        """Starts the thread; once, before anything else but `close`."""
        self._thread.start()

    # --- any thread ---------------------------------------------------------------------------------------------------

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The limits of its requests."""
        return self._scheduler.config

    def tell_steps(self, sink: StepSink) -> None:
        """Tells `sink` of every step from now on; before the first submission."""
        self._step_sink = sink

    @property
    def end_error(self) -> EngineDeadError | None:
        """The reason why no further request is taken; None while the engine can go on."""
        if self._end_error is None and self._has_started and not self._thread.is_alive():
            return self._stopped_unseen
        return self._end_error

    @property
    def _has_started(self) -> bool:
        return self._thread.ident is not None

    def expect(self) -> None:
        """Wakes the engine's thread for a submission that is being made; `submit` follows, or nothing does.

        A processor that has slept for milliseconds takes 0.1 to 0.2 ms to wake, as long as a prompt takes to be
        checked.
        """
        with self._condition:
            self._condition.notify()

    def submit(self, submissions: Iterable[Submission]) -> None:
        """Queues submissions that were not refused yet; their sinks hear of all that follows, refusals included.

        Raises:
            EngineDeadError: the engine is closed or dead.
        """
        arrived = list(submissions)
        with self._condition:
            error = self.end_error
            if error is not None:
                raise error.with_traceback(None)
            if self._is_closing:
                raise end_errors.closed()
            self._unanswered.update(arrived)
            self._inbox.append(lambda: self._admit(arrived))
            self._condition.notify()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests with finish_reason 'abort'; ids that are not, or no longer, there are passed over."""
        ids = list(request_ids)
        self._post_if_alive(lambda: self._abort(ids))

    def withdraw(self, submissions: Iterable[Submission]) -> None:
        """Aborts these submissions of the caller's, never another request that has the same id."""
        withdrawn = list(submissions)
        self._post_if_alive(lambda: self._withdraw(withdrawn))

    def stats(self) -> EngineStats:
        """Figures as they are between two steps; after the end, the last ones.

        Raises:
            EngineDeadError: this process is a fork of the engine's.
        """
        return self._call(self._figures)

    def flush_prefix_cache(self) -> None:
        """Forgets all cached prefixes.

        Raises:
            EngineDeadError: this process is a fork of the engine's.
        """
        self._call(self._scheduler.flush_prefix_cache)

    def place_adapter(self, adapter: Adapter, matrices: Matrices) -> None:
        """Brings an adapter to the device if there is room, between two steps.

        Raises:
            EngineDeadError: the engine is closed or dead.
            Exception: what the device says.
        """
        queue = self._adapters
        assert queue is not None, "an engine without adapters has none to place"

        def place() -> None:
            if self._end_error is not None:
                raise self._end_error.with_traceback(None)
            queue.place(adapter, matrices)

        self._call(place)

    def retire_adapter(self, adapter: Adapter) -> None:
        """Gives an adapter's place back when its last request has ended; no new one may name it."""
        queue = self._adapters
        if queue is not None:
            self._post_if_alive(lambda: queue.retire(adapter))

    def close(self) -> None:
        """Aborts all requests, waits for the step in flight, ends the thread and gives memory back; once or often."""
        if self._is_forked:
            return
        is_own_thread = threading.current_thread() is self._thread  # a collection of garbage there has found the engine
        with self._condition:
            self._is_closing = True
            self._closes_itself |= is_own_thread
            self._condition.notify()
        if not is_own_thread and self._has_started:
            self._thread.join()
        if not is_own_thread or self._end_error is not None:  # no step will run
            self._give_back()

    def _give_back(self) -> None:
        with self._giving_back:  # a second closer waits; a call that failed is made again
            self._shutdown()
            self._shutdown = _nothing

    def check_process(self) -> None:
        """
        Raises:
            EngineDeadError: this process is a fork of the engine's, where no news will come.
        """
        if self._is_forked and self._end_error is not None:
            raise self._end_error.with_traceback(None)

    def _after_fork(self) -> None:
        """Runs in the child: it has no thread to run steps, and the lock may be held by a thread that it lacks."""
        self._is_forked = True
        self._condition = threading.Condition()
        self._end_error = self._end_error or end_errors.forked()

    def _post_if_alive(self, command: Callable[[], None]) -> None:
        with self._condition:
            if self.end_error is None:
                self._inbox.append(command)
                self._condition.notify()

    def _call(self, function: Callable[[], T]) -> T:
        self.check_process()  # a fork's copy of the figures and of the cache is nobody's
        call = _Call(function)
        with self._condition:
            if self.end_error is None:
                self._inbox.append(call)
                self._condition.notify()
                call_here = False
            else:
                call_here = True  # the thread has let go of everything
        if call_here:
            self._thread.join()
            call()
        return call.future.result()

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def _run(self, runner: StepSubmitter) -> None:
        error = self._stopped_unseen
        try:
            self._prepare_thread()
            while self._take_commands():
                self._step(runner)
                if self._step_sink is not None:
                    self._step_sink.flush()
            self._finish_step_in_flight()
            self._abort(list(self._submissions))
            error = end_errors.closed()
        except EngineDeadError as dead:
            error = dead
            logger.error("%s", dead)
        except BaseException as fault:  # also what is no Exception, and what was thrown into this thread
            error = end_errors.stopped(fault)
            logger.exception("the engine met an internal error")
            end_errors.drop_locals(fault)
        finally:
            # The error that callers get holds this frame, and the engine what prepared the thread.
            self._prepare_thread = _nothing
            if self._adapters is not None:
                self._adapters.close()
            del runner
            self._surely_end(error)
        if self._closes_itself:
            self._give_back()

    def _take_commands(self) -> bool:
        """Carries out callers' commands; blocks while idle. False: the engine is to end."""
        has_work = self._in_flight is not None or self._scheduler.has_work()
        with self._condition:
            if not (has_work or self._inbox or self._is_closing):
                # Release the GIL first, so that the thread waiting for the last tokens runs.
                self._condition.wait(_IDLE_GRACE_S)
            is_idle = not (has_work or self._inbox or self._is_closing)
        if is_idle:
            self._count_step()
        with self._condition:
            while not (has_work or self._inbox or self._is_closing):
                self._surely_could_go_on()
                # Not for ever: a garbage collection right here may close the engine without waking this wait.
                self._condition.wait(_CLOSED_POLL_S)
            self._commands += self._inbox
            self._inbox.clear()
            is_closing = self._is_closing
        if is_idle:
            self._busy_since = time.monotonic()
        self._carry_out_commands()
        return not is_closing

    def _surely_could_go_on(self) -> None:
        """
        Raises:
            EngineDeadError: no step could run. A health check hears of it before a request does.
        """
        try:
            self._check_idle()
        except MllmError as fault:
            raise end_errors.lost_while_idle(fault) from fault

    def _count_step(self) -> None:
        """Counts the last step in the figures, if it was not."""
        step, self._uncounted = self._uncounted, None
        if step is not None:
            self._recorder.step_over(*step)

    def _figures(self) -> EngineStats:
        self._count_step()
        adapters = None if self._adapters is None else self._adapters.stats()
        return self._recorder.snapshot(self._scheduler.stats(), adapters)

    def _carry_out_commands(self) -> None:
        while self._commands:
            self._commands[0]()
            self._commands.popleft()

    def _surely_end(self, error: EngineDeadError) -> None:
        """Calls `_end` again if another exception thrown into this thread interrupts it."""
        for _ in range(_TRIES):
            with suppress(BaseException):
                self._end(error)
                return

    def _end(self, error: EngineDeadError) -> None:
        """Stops for good: every waiting caller gets `error`, whatever fails on the way; may be repeated."""
        with self._condition:
            self._end_error = error
            self._commands += self._inbox
            self._inbox.clear()
        with suppress(BaseException):
            self._count_step()
        while self._commands:  # calls are answered; submissions are refused, now that _end_error is set
            with suppress(BaseException):
                self._commands[0]()
            self._commands.popleft()
        for submission in list(self._unanswered):
            with suppress(BaseException):
                self._fail(submission, error)
            submission.engine_ended(error)  # for what could not be told as it should be
            self._unanswered.discard(submission)
        if self._step_sink is not None:
            with suppress(BaseException):
                self._step_sink.flush()
        step, self._in_flight = self._in_flight, None
        if step is not None:  # the memory that it works in is given back next
            with suppress(BaseException):
                _wait_quietly(step.handle)

    def _admit(self, submissions: list[Submission]) -> None:
        for submission in submissions:
            if self._end_error is not None:
                return  # all that wait are told
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
        if adapter is None or self._adapters is None:
            self._schedule(sequence)
        else:
            self._adapters.take(adapter, sequence)

    def _schedule(self, sequence: Sequence) -> None:
        request = sequence.request
        try:
            self._scheduler.add(request)
        except RequestError as error:
            self._fail(sequence.submission, error)
            return
        self._live[request] = sequence
        if sequence.is_watched:
            self._watched[request] = sequence

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            submission = self._submissions.get(request_id)
            if submission is not None:
                self._end_submission(submission, "abort")

    def _withdraw(self, submissions: list[Submission]) -> None:
        for submission in submissions:
            if self._submissions.get(submission.request_id) is submission:
                self._end_submission(submission, "abort")

    def _fail(self, submission: Submission, error: MllmError) -> None:
        submission.failure = error
        self._end_submission(submission, "error")

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
        if submission.adapter is not None and self._adapters is not None:
            self._adapters.leave(sequence)  # behind its sibling, which finds the adapter where it is
        if submission.is_finished:
            self._unanswered.discard(submission)
            if self._submissions.get(submission.request_id) is submission:
                del self._submissions[submission.request_id]

    # --- steps --------------------------------------------------------------------------------------------------------

    def _step(self, runner: StepSubmitter) -> None:
        """Launches the next step, if there is one, then waits for the one before it."""
        batch = self._scheduler.schedule()
        launched = None
        if batch is not None:
            _forget_prompt_logprobs(batch)
            now = time.monotonic()
            try:
                launched = _Step(batch, runner.submit(batch), now)
            except Exception as error:
                self._finish_step_in_flight()
                self._steps_failed([batch], error)
                return
        previous, self._in_flight = self._in_flight, launched
        if previous is not None:
            self._finish_step(previous)
            self._has_news = True
        self._log_figures()

    def _finish_step_in_flight(self) -> None:
        step, self._in_flight = self._in_flight, None
        if step is not None:
            self._finish_step(step)

    def _finish_step(self, step: _Step) -> None:
        """Waits for a step and hands its tokens out; the one launched after it stays in flight."""
        self._count_step()  # the one before: this one's first tokens did not wait for that
        batch = step.batch
        try:
            output = step.handle.wait()
        except Exception as error:
            lost = [batch]
            later, self._in_flight = self._in_flight, None
            if later is not None:
                _wait_quietly(later.handle)
                lost.append(later.batch)
            self._steps_failed(lost, error)
            return
        now = time.monotonic()
        host_seconds = max(step.launched - self._busy_since, 0.0)
        self._scheduler.step_took(batch, now - self._busy_since - host_seconds, host_seconds)
        self._busy_since = now
        result = self._scheduler.update(batch, output.token_ids, output.broken_rows.tolist(), output.runs)
        output.record_logprobs(result.accepted, result.counts)
        if self._step_sink is not None:
            self._step_sink.on_step(batch, output, result)
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
        if self._step_sink is not None:
            self._step_sink.flush()
        self._scheduler.finish_update()  # while the threads that were told wake up
        self._uncounted = batch, result, now

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
            self._fail(sequence.submission, failure)

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
            self._fail(sequence.submission, failure)
            return 0
        if stop_string is not None:
            self._scheduler.end_at(sequence.request, sequence.num_taken, stop_string)
        if sequence.finish_reason is not None:
            self._forget(sequence)
        return num_tokens - len(sequence.request.output_token_ids)

    # --- failures -----------------------------------------------------------------------------------------------------

    def _steps_failed(self, batches: list[ScheduledBatch], error: Exception) -> None:
        """Ends the requests of lost steps.

        Raises:
            EngineDeadError: the device does not answer any more.
        """
        shape = f"{batches[0].num_requests} requests and {batches[0].num_tokens} tokens"
        logger.error("a step of %s failed", shape, exc_info=error)
        end_errors.drop_locals(error)
        lost = [request for batch in batches for request in self._scheduler.fail(batch)]
        try:
            self._check_device()
        except Exception as fault:
            raise end_errors.device_lost(shape, error, fault) from error
        failure = end_errors.step_failed(shape, error)
        for request in lost:
            sequence = self._live.get(request)
            if sequence is not None:
                self._fail(sequence.submission, failure)
        logger.warning("%d requests ended with an error; the engine goes on", len(lost))

    def _log_figures(self) -> None:
        now = time.monotonic()
        # Also reached when an idle engine is polled for stats; a server does so twice a second.
        if self._log_interval_s and self._has_news and now >= self._next_log:
            self._has_news = False
            self._next_log = now + self._log_interval_s
            logger.info("%s", self._figures())


# The engines of this process: a fork has the objects, and not the threads that run them.
_cores: weakref.WeakSet[EngineCore] = weakref.WeakSet()


def _cut_off() -> None:
    for core in tuple(_cores):
        core._after_fork()


os.register_at_fork(after_in_child=_cut_off)


def _forget_prompt_logprobs(batch: ScheduledBatch) -> None:
    """Forgets a preempted prompt's scores: it is computed, and scored, from its start again."""
    for request in batch.admitted:
        if request.needs_prompt_logprobs:
            request.prompt_logprobs.clear()


def _wait_quietly(handle: StepHandle) -> None:
    """Waits for a step whose result is of no use, so that nothing of it runs any more."""
    try:
        handle.wait()
    except Exception as error:
        logger.debug("the step after the failed one failed too: %s", error)
