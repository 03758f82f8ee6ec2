"""Steps of an engine of several ranks: each is announced to the followers, and is over when no rank was lost."""

from __future__ import annotations

import numpy as np

from mllm_compile.ranks.group import RankGroup
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.step.output import StepOutput
from mllm_compile.runtime.step.results import StepHandle
from mllm_compile.runtime.step.runner import StepRunner


class RankedHandle:
    """A step that was launched on all ranks."""

    def __init__(self, handle: StepHandle, group: RankGroup) -> None:
        self._handle, self._group = handle, group

    def wait(self) -> StepOutput:
        """Blocks until the step is over.

        Raises:
            MllmError: a rank has ended.
            RuntimeError: as StepHandle.wait.
        """
        self._group.waiting(self._handle.wait_for_tokens)
        return self._handle.wait()

    def token_of(self, request: Request, place: int) -> int:
        """Return what StepHandle.token_of does."""
        return self._handle.token_of(request, place)


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
        return RankedHandle(handle, self._group)

    def experts_of(self, row: int, num_tokens: int) -> np.ndarray:
        """The experts of a row's first tokens, as StepRunner.experts_of; every rank has all of them."""
        return self._runner.experts_of(row, num_tokens)
