"""Launches an engine's steps and hands their tokens out: one is in flight while the next is scheduled.

When a step fails, its requests end with an error and their pages come back. The others go on if the device still
answers. Free of torch: any StepSubmitter will do. Read next: runtime/schedule/scheduler.py, live_requests.py.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mllm_compile.engine.core import end_errors
from mllm_compile.engine.core.live_requests import LiveRequests
from mllm_compile.engine.sequences import StepSink
from mllm_compile.engine.stats import StatsRecorder
from mllm_compile.runtime.schedule.data_parallel import DataParallelScheduler
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch, UpdateResult
from mllm_compile.runtime.schedule.scheduler import Scheduler
from mllm_compile.runtime.step.output import StepOutput

logger = logging.getLogger("mllm_compile.engine")

MOST_KEPT = 1 << 24  # ids of kept tokens in an answer: 64 MiB, and several times as much as JSON


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

    def experts_of(self, row: int, num_tokens: int) -> np.ndarray:
        """The experts of a row's first tokens, [num_tokens, layers, k] int16. Waits for the device."""


@dataclass(frozen=True, slots=True)
class _Step:
    batch: ScheduledBatch
    handle: StepHandle
    launched: float  # time.monotonic() before its launch
    runner: StepSubmitter


class Steps:
    """Used by the engine's thread alone.

    Args:
        scheduler: makes the batch of each step.
        requests: the requests of that scheduler.
        recorder: counts tokens and times.
        check_device: raises when the device cannot be used any more; asked after a step has failed.

    Attributes:
        sink: told of every step; None: nobody is.
        tell_pages: tells how the prefix cache has changed; None: nobody is told.
    """

    def __init__(
        self,
        scheduler: Scheduler | DataParallelScheduler,
        requests: LiveRequests,
        recorder: StatsRecorder,
        check_device: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._recorder = recorder
        self._check_device = check_device
        self.sink: StepSink | None = None
        self.tell_pages: Callable[[], None] | None = None
        self._in_flight: deque[_Step] = deque()
        self._most_ahead = max(
            1, scheduler.config.pipeline_parallel_size - 1
        )  # steps beside the one that is waited for
        # time.monotonic() when the tokens of the last step came, or when there was work again after that.
        self._busy_since = 0.0
        # The last step, its result, and when its tokens came.
        self._uncounted: tuple[ScheduledBatch, UpdateResult, float] | None = None

    def has_work(self) -> bool:
        """True while a step is in flight or another one may follow."""
        return bool(self._in_flight) or self._scheduler.has_work()

    def work_is_back(self) -> None:
        """Says that the time since the last step was idle."""
        self._busy_since = time.monotonic()

    def run(self, runner: StepSubmitter) -> bool:
        """Launches the next step, if there is one, then waits for the one before it, or as far before as stages go.

        Returns:
            True if a step was finished.

        Raises:
            EngineDeadError: the device does not answer any more.
        """
        batch = self._scheduler.schedule()
        if batch is not None:
            _forget_prompt_logprobs(batch)
            now = time.monotonic()
            try:
                self._in_flight.append(_Step(batch, runner.submit(batch), now, runner))
            except Exception as error:
                self.finish()
                self._failed([batch], error)
                return False
        is_over = len(self._in_flight) > (0 if batch is None else self._most_ahead)
        if is_over:
            self._finish(self._in_flight.popleft())
        return is_over

    def finish(self) -> None:
        """Waits for the steps in flight, if there are some."""
        while self._in_flight:
            self._finish(self._in_flight.popleft())

    def drop(self) -> None:
        """Waits for the steps in flight without taking their tokens."""
        while self._in_flight:
            _wait_quietly(self._in_flight.popleft().handle)

    def count(self) -> None:
        """Counts the last step in the figures, if it was not."""
        step, self._uncounted = self._uncounted, None
        if step is not None:
            self._recorder.step_over(*step)

    def flush(self) -> None:
        """Has the sink pass on what it was told."""
        if self.sink is not None:
            self.sink.flush()
        if self.tell_pages is not None:
            self.tell_pages()

    def _finish(self, step: _Step) -> None:
        """Waits for a step and hands its tokens out; the one launched after it stays in flight."""
        self.count()  # the one before: this one's first tokens did not wait for that
        batch = step.batch
        try:
            output = step.handle.wait()
        except Exception as error:
            lost = [batch]
            while self._in_flight:
                later = self._in_flight.popleft()
                _wait_quietly(later.handle)
                lost.append(later.batch)
            self._failed(lost, error)
            return
        now = time.monotonic()
        host_seconds = max(step.launched - self._busy_since, 0.0)
        self._scheduler.step_took(batch, now - self._busy_since - host_seconds, host_seconds)
        self._busy_since = now
        result = self._scheduler.update(batch, output.token_ids, output.broken_rows.tolist(), output.runs)
        output.record_logprobs(result.accepted, result.counts)
        for request in result.finished:
            if request.params.return_routed_experts:
                row = int(batch.rows[batch.requests.index(request)])
                count = len(request.prompt_token_ids) + len(request.output_token_ids) - 1
                request.routed_experts = step.runner.experts_of(row, count)
        if self.sink is not None:
            self.sink.on_step(batch, output, result)
        self._requests.take(batch, result)
        if output.kept:
            self._fail_large(batch, result.accepted)
        self.flush()
        self._scheduler.finish_update()  # while the threads that were told wake up
        self._uncounted = batch, result, now

    def _fail_large(self, batch: ScheduledBatch, accepted: list[int]) -> None:
        """Ends requests whose answers have more kept tokens than memory is meant for."""
        for request in (batch.requests[row] for row in accepted):
            if request.num_kept > MOST_KEPT:
                self._requests.fail_requests([request], end_errors.too_many_kept(request, MOST_KEPT))

    def _failed(self, batches: list[ScheduledBatch], error: Exception) -> None:
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
        self._requests.fail_requests(lost, end_errors.step_failed(shape, error))
        logger.warning("%d requests ended with an error; the engine goes on", len(lost))


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
