"""The steps of a rank that follows: it runs the model as rank 0 does, and leaves the choice of tokens to it."""

from __future__ import annotations

import torch

from mllm_compile.runtime.ranks.records import StepRecord
from mllm_compile.runtime.step.paths.base import Step
from mllm_compile.runtime.step.runner import StepRunner


class FollowingStepRunner(StepRunner):
    """Runs the steps that rank 0 has announced. At the end of each all ranks have its tokens: rank 0 broadcasts them,
    or they have chosen together."""

    def follow(self, record: StepRecord) -> None:
        """Launches a step as rank 0 has planned it."""
        batch = record.batch
        with torch.inference_mode(), self._runner.on_device():
            self._pools.enter_pages(batch)
            path = self._paths.of(batch)
            plan = self._planner.with_media(path.plan(batch), batch, record.media)
            plan = self._planner.with_scored(plan, record.scored_indices)
            path.follow(Step(batch, plan, record.choice))
            self._pools.save_states(batch.state_saves)
