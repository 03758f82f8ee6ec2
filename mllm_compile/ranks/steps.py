"""Steps of an engine of several ranks: each is announced to the followers, and is over when no rank was lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from mllm_compile.ranks.group import RankGroup
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.step.output import StepOutput
from mllm_compile.runtime.step.results import StepHandle
from mllm_compile.runtime.step.runner import PreparedStep, StepRunner


class RankedHandle:
    """A step that was announced to all ranks, and launched on this one or is about to be."""

    def __init__(self, launched: Callable[[], StepHandle], group: RankGroup) -> None:
        """
        Args:
            launched: the step's handle, which launches it where that was put off; raises as RankedStepRunner.submit.
        """
        self._launched, self._group = launched, group

    def wait(self) -> StepOutput:
        """Blocks until the step is over.

        Raises:
            MllmError: a rank has ended.
            RuntimeError: as StepHandle.wait.
        """
        handle = self._launched()
        self._group.waiting(handle.wait_for_tokens)
        return handle.wait()

    def token_of(self, request: Request, place: int) -> int:
        """Return what StepHandle.token_of does."""
        return self._launched().token_of(request, place)


class RankedStepRunner:
    """Runs steps on all ranks; rank 0's runner announces them (`RankGroup.announce`)."""

    def __init__(self, runner: StepRunner, group: RankGroup) -> None:
        self._runner, self._group = runner, group

    def prepare_thread(self) -> None:
        """Makes the calling thread one that submits, as StepRunner.prepare_thread does."""
        self._runner.prepare_thread()

    def submit(self, batch: ScheduledBatch) -> RankedHandle:
        """Launches a step.

        Raises:
            MllmError: a rank has ended, or this one could not run it: then the others are ahead of it.
        """
        handle = self._runner.submit(batch)
        self._group.launched()
        return RankedHandle(lambda: handle, self._group)

    def experts_of(self, row: int, num_tokens: int) -> np.ndarray:
        """The experts of a row's first tokens, as StepRunner.experts_of; every rank has all of them."""
        return self._runner.experts_of(row, num_tokens)


class StagedStepRunner(RankedStepRunner):
    """Runs steps of a pipeline on a CPU, where a launch returns when the step is computed.

    So a step is launched here when those that other stages may compute meanwhile were announced: behind the next
    `submit`, or when it is waited for.
    """

    def __init__(self, runner: StepRunner, group: RankGroup) -> None:
        super().__init__(runner, group)
        self._put_off: deque[_PutOff] = deque()

    def submit(self, batch: ScheduledBatch) -> RankedHandle:
        step = _PutOff(self._runner.prepare(batch))
        self._put_off.append(step)
        while len(self._put_off) >= self._group.num_stages:
            self._launch_next()
        return RankedHandle(lambda: self._launched(step), self._group)

    def _launched(self, step: _PutOff) -> StepHandle:
        while step.handle is None and step.error is None:
            self._launch_next()
        if step.error is not None:
            raise step.error
        assert step.handle is not None, "it was launched without an error"
        return step.handle

    def _launch_next(self) -> None:
        """Launches the oldest step; an error is that step's."""
        step = self._put_off.popleft()
        try:
            step.handle = self._runner.launch(step.prepared)
        except Exception as error:
            step.error = error
        else:
            self._group.launched()


class _PutOff:
    """A step that is launched later."""

    def __init__(self, prepared: PreparedStep) -> None:
        self.prepared = prepared
        self.handle: StepHandle | None = None
        self.error: Exception | None = None
