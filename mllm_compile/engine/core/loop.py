"""The engine's one thread: takes callers' commands between two steps, runs steps, and tells all of its end.

EngineCore owns the scheduler and the step runner; only its thread touches them while it runs. Callers put commands
into an inbox; the thread takes them between two steps. However the thread ends, all waiting callers are told; when the
device does not answer any more, the engine is dead and says why. Read next: steps.py, live_requests.py.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from mllm_compile.engine.core import end_errors
from mllm_compile.engine.core.gate import Gate
from mllm_compile.engine.core.live_requests import LiveRequests
from mllm_compile.engine.core.steps import Steps, StepSubmitter
from mllm_compile.engine.sequences import StepSink, Submission
from mllm_compile.engine.stats import EngineStats, ExpertsSource, ForwardTimesSource, StatsRecorder
from mllm_compile.errors import EngineDeadError, MllmError
from mllm_compile.process.no_gc import see_imports
from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.data_parallel import DataParallelScheduler
from mllm_compile.runtime.schedule.pages.prefix_cache import RadixCache
from mllm_compile.runtime.schedule.pages.sessions import SessionState
from mllm_compile.runtime.schedule.scheduler import Scheduler
from mllm_compile.runtime.schedule.tiers.tiers import Tiers

if TYPE_CHECKING:
    from mllm_compile.engine.core.adapter_queue import AdapterParts, AdapterQueue

logger = logging.getLogger("mllm_compile.engine")

T = TypeVar("T")

_TRIES = 3  # to tell all callers that the engine has ended
_IDLE_GRACE_S = 1e-3  # grace period before idle work
_IDLE_STORES_S = 0.05  # likewise before stores, which the next prompt would run beside
_CLOSED_POLL_S = 1.0  # how often an idle engine checks whether it was closed


def _nothing() -> None:
    """The default of an optional callback."""


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
        except EngineDeadError as error:  # a step was in flight whose device does not answer
            self.future.set_exception(error)
            raise
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
        self._is_closing = False
        self._giving_back = threading.RLock()
        self._closes_itself = False  # `close` was called on the engine's own thread
        self._is_forked = False  # this is a forked process, which has no such thread
        self.gate = Gate()

        # Used by the engine's thread alone.
        self._commands: deque[Callable[[], None]] = deque()  # taken out of the inbox; the first may be half done
        self._requests = LiveRequests(scheduler, self._recorder, self.post, adapters)
        self._steps = Steps(scheduler, self._requests, self._recorder, check_device)
        self._stopped_unseen = end_errors.stopped_unseen()

        # Only the thread holds the step runner: what it has on the device goes when the thread ends.
        scheduler.wake_by(partial(self.post, _nothing))
        self._thread = threading.Thread(target=self._run, args=(step_runner,), name="mllm-engine", daemon=True)
        _cores.add(self)

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
        self._steps.sink = sink

    def watch_pages(self, watch: Callable[[list[RadixCache], list[Tiers]], Callable[[], None]]) -> None:
        """Has the prefix caches of all ranks watched; what `watch` gives is called behind each step from now on."""

        def begin() -> None:
            self._steps.tell_pages = watch(self._scheduler.caches, self._scheduler.all_tiers)

        self.between_steps(begin)

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
            EnginePausedError: it takes no requests now.
        """
        arrived = list(submissions)
        with self._condition:
            error = self.end_error
            if error is not None:
                raise error.with_traceback(None)
            if self._is_closing:
                raise end_errors.closed()
            refusal = self.gate.refusal
            if refusal is not None:
                raise refusal
            self._requests.arrive(arrived)
            self._inbox.append(lambda: self._admit(arrived))
            self._condition.notify()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests with finish_reason 'abort'; ids that are not, or no longer, there are passed over."""
        ids = list(request_ids)
        self.post(lambda: self._requests.abort(ids))

    def withdraw(self, submissions: Iterable[Submission]) -> None:
        """Aborts these submissions of the caller's, never another request that has the same id."""
        withdrawn = list(submissions)
        self.post(lambda: self._requests.withdraw(withdrawn))

    def stats(self) -> EngineStats:
        """Figures as they are between two steps; after the end, the last ones.

        Raises:
            EngineDeadError: this process is a fork of the engine's.
        """
        return self._call(self._figures)

    def flush_prefix_cache(self, *, retracts: bool = False) -> None:
        """See Engine.flush_prefix_cache."""
        if retracts:
            self.while_still(lambda requests: requests.retract(flushes=True))
        else:
            self._call(self._scheduler.flush_prefix_cache)

    def session_state(self, key: Hashable) -> SessionState | None:
        """The state of a session; None: it is unknown."""
        return self._call(lambda: self._scheduler.session_state(key))

    def end_session(self, key: Hashable) -> bool:
        """Ends a session; False: it is unknown."""
        return self._call(lambda: self._scheduler.end_session(key))

    @property
    def adapters(self) -> AdapterQueue:
        """The requests that wait for their adapters; for commands to the engine's thread."""
        queue = self._requests.adapters
        assert queue is not None, "an engine without adapters has no use for it"
        return queue

    def between_steps(self, function: Callable[[], T]) -> T:
        """Runs a function on the engine's thread between two launches; a step may still be in flight.

        Raises:
            EngineDeadError: the engine is closed or dead.
            Exception: the function's.
        """

        def alive() -> T:
            if self._end_error is not None:
                raise self._end_error.with_traceback(None)
            return function()

        return self._call(alive)

    def post(self, command: Callable[[], None]) -> None:
        """Has the engine's thread run a command, later; none after its end."""
        with self._condition:
            if self.end_error is None:
                self._inbox.append(command)
                self._condition.notify()

    def while_still(self, function: Callable[[LiveRequests], T]) -> T:
        """Runs a function on the engine's thread with no step in flight, when all tokens were handed out.

        Raises:
            EngineDeadError: the engine is closed or dead.
            Exception: the function's.
        """

        def still() -> T:
            self._steps.finish()
            return function(self._requests)

        return self.between_steps(still)

    def move_gate(self, move: Callable[[Gate], T]) -> T:
        """Changes the gate; the engine's thread looks at it again."""
        with self._condition:
            found = move(self.gate)
            self._inbox.append(_nothing)
            self._condition.notify()
            return found

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
            with suppress(EngineDeadError):  # which the future has
                call()
        return call.future.result()

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def _run(self, runner: StepSubmitter) -> None:
        error = self._stopped_unseen
        try:
            self._prepare_thread()
            while self._take_commands():
                if not self.gate.is_shut:
                    self._has_news |= self._steps.run(runner)
                self._steps.flush()
                self._log_figures()
            self._steps.finish()
            self._requests.abort_all()
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
            if self._requests.adapters is not None:
                self._requests.adapters.close()
            del runner
            self._surely_end(error)
        if self._closes_itself:
            self._give_back()

    def _take_commands(self) -> bool:
        """Carries out callers' commands; blocks while idle. False: the engine is to end."""
        if self.gate.drained is not None and self._requests.are_none:
            self._steps.finish()
            with self._condition:
                self.gate.drain_is_over()
        has_work = self._steps.has_work() and not self.gate.is_shut and not self._scheduler.awaits_copies
        with self._condition:
            if not (has_work or self._inbox or self._is_closing):
                # Release the GIL first, so that the thread waiting for the last tokens runs.
                self._condition.wait(_IDLE_GRACE_S)
            is_idle = not (has_work or self._inbox or self._is_closing)
        if is_idle:
            self._steps.count()
            has_work = self._scheduler.has_idle_work and not self.gate.is_shut
            if has_work:
                with self._condition:
                    has_work = not self._condition.wait_for(lambda: self._inbox or self._is_closing, _IDLE_STORES_S)
        while not has_work and self._is_without_news():
            pass
        with self._condition:
            self._commands += self._inbox
            self._inbox.clear()
            is_closing = self._is_closing
        if is_idle:
            self._steps.work_is_back()
        self._carry_out_commands()
        return not is_closing

    def _is_without_news(self) -> bool:
        """Waits for commands, a second long."""
        with self._condition:
            if self._inbox or self._is_closing:
                return False
            self._surely_could_go_on()
            # Not for ever: a garbage collection right here may close the engine without waking this wait.
            is_idle = not self._condition.wait(_CLOSED_POLL_S)
        if is_idle:
            see_imports()
        return True

    def _surely_could_go_on(self) -> None:
        """
        Raises:
            EngineDeadError: no step could run. A health check hears of it before a request does.
        """
        try:
            self._check_idle()
        except MllmError as fault:
            raise end_errors.lost_while_idle(fault) from fault

    def _figures(self) -> EngineStats:
        self._steps.count()
        queue = self._requests.adapters
        adapters = None if queue is None else queue.stats()
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
            self._steps.count()
        with suppress(BaseException):
            self.gate.drain_is_over(error)
        while self._commands:  # calls are answered; submissions are refused, now that _end_error is set
            with suppress(BaseException):
                self._commands[0]()
            self._commands.popleft()
        self._requests.tell_all(error)
        with suppress(BaseException):
            self._steps.flush()
        with suppress(BaseException):
            self._steps.drop()  # the memory that it works in is given back next

    def _admit(self, submissions: list[Submission]) -> None:
        if self._end_error is None:  # else all that wait are told
            self._requests.admit(submissions)

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
