"""The interface of a path of steps, and what all paths share.

A path is one way from a ScheduledBatch to tokens. In this order it plans the step, uploads its inputs, launches the
model and gives results. choose.py says which one a batch takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.ranks.records import SamplingMode
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.step.common_prefix import CommonPrefix
from mllm_compile.runtime.step.media_steps import MediaSteps
from mllm_compile.runtime.step.plan import Planner, StepPlan
from mllm_compile.runtime.step.pools import StepPools
from mllm_compile.runtime.step.results import StepResults
from mllm_compile.runtime.step.sampling import StepSampling
from mllm_compile.runtime.step.seen_images import ImageSteps
from mllm_compile.runtime.step.source_steps import SourceSteps


@dataclass(slots=True, eq=False)
class Step:
    """A step that is planned.

    Attributes:
        choice: how ranks come to its tokens.
        hidden_states: [T, …] of its tokens, and perhaps of padding, where the program gives some; set by the forward
            path.
    """

    batch: ScheduledBatch
    plan: StepPlan
    choice: SamplingMode
    hidden_states: torch.Tensor | None = None


@dataclass(frozen=True)
class StepParts:
    """The objects that the paths of one runner share."""

    runner: ModelRunner
    planner: Planner
    pools: StepPools
    media: MediaSteps
    sources: SourceSteps
    images: ImageSteps
    sampling: StepSampling
    common_prefix: CommonPrefix


class StepPath(ABC):
    """One way from a batch to its tokens. Used by one thread."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._runner, self._planner, self._pools = parts.runner, parts.planner, parts.pools
        self._sampling, self._common_prefix = parts.sampling, parts.common_prefix

    def plan(self, batch: ScheduledBatch) -> StepPlan:
        """Plans a step whose new pages are entered on the host."""
        return self._planner.plan(batch)

    def _add_adapters(self, whole: ScheduledBatch, batch: ScheduledBatch, plan: StepPlan) -> bool:
        """Adds the slots of tokens' adapters to a step that runs the program for adapters; says whether it does.

        Args:
            whole: of all ranks, which all run the same program; batch: of this one.
        """
        if self._runner.row_state.adapters is None or not self._takes_adapters(whole):
            return False
        plan.fields.adapter_slots = np.full(plan.fields.positions.size, -1, dtype=np.int32)
        plan.fields.adapter_slots[: batch.num_tokens] = np.repeat(batch.adapter_slots, batch.num_new)
        return True

    def _follow_adapters(self, batch: ScheduledBatch) -> bool:
        """Brings the adapters of a captured step's rows to the device; True if it runs the program for adapters."""
        adapters = self._runner.row_state.adapters
        if adapters is None or not self._takes_adapters(batch):
            return False
        adapters.follow(batch.rows, batch.adapter_slots)
        return True

    def _takes_adapters(self, batch: ScheduledBatch) -> bool:
        """True if a batch runs the program for adapters, where there is one."""
        return batch.has_adapters or self._runner.always_takes_adapters

    @abstractmethod
    def run(self, step: Step) -> StepResults | None:
        """Launches a step and the choice of its tokens; None: it takes the forward path."""

    @abstractmethod
    def follow(self, step: Step) -> None:
        """Launches a step on a rank that leaves the choice of tokens to rank 0, or makes it with all ranks."""
