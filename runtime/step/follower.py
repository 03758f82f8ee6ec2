"""The steps of a rank that follows, and the messages between them: it does as rank 0, which alone chooses tokens."""

from __future__ import annotations

import torch

from mllm_compile.runtime.device.ranked_sleep import FollowedSleep, is_sleep
from mllm_compile.runtime.lora.wire import unpack
from mllm_compile.runtime.ranks.records import StepRecord
from mllm_compile.runtime.step.paths.base import Step
from mllm_compile.runtime.step.runner import StepRunner
from mllm_compile.runtime.updates.wire import FollowedUpdate, is_update


class FollowingStepRunner(StepRunner):
    """Runs the steps that rank 0 has announced. At the end of each all ranks have its tokens: rank 0 broadcasts them,
    or they have chosen together."""

    _update: FollowedUpdate | None = None
    _sleep: FollowedSleep | None = None

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

    def take(self, message: bytearray) -> None:
        """Does what rank 0 says between two steps: weights, sleep, or this rank's part of an adapter."""
        if is_sleep(message):
            with self._runner.on_device():
                if self._sleep is None:
                    self._sleep = FollowedSleep(self._runner.sleeping_memory(), self._runner.least_of_ranks)
                self._sleep.take(message)
            return
        if not is_update(message):
            self._take_adapter(message)
            return
        with self._runner.on_device():
            if self._update is None:
                live = self._runner.model.live
                assert live is not None, "rank 0 has looked"
                self._update = FollowedUpdate(live, self._runner.least_of_ranks)
            self._update.take(message)

    def _take_adapter(self, message: bytearray) -> None:
        """Puts this rank's part of an adapter into a slot, behind the steps that were launched."""
        lora = self._runner.model.lora
        assert lora is not None, "rank 0 sends adapters of a program that takes some"
        with torch.inference_mode(), self._runner.on_device():
            lora.pool.write(*unpack(message, lora.pool.dtype))
