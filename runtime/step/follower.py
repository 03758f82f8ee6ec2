"""The steps of a rank that follows: it runs the model as rank 0 does, and leaves the choice of tokens to it."""

from __future__ import annotations

import numpy as np
import torch

from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.step.plan import StepPlan
from mllm_compile.runtime.step.runner import StepRunner, scored_parts


class FollowingStepRunner(StepRunner):
    """Runs the steps that rank 0 has announced. Tokens come from there: rank 0's last ones are spread to all ranks at
    the start of each step that has decodes."""

    def follow(self, batch: ScheduledBatch, scored_indices: np.ndarray | None) -> None:
        """Launches a step.

        Args:
            batch: as rank 0 has it, without requests.
            scored_indices: [N] tokens whose logits rank 0 asks for besides; None: for none.
        """
        with torch.inference_mode(), self._runner.on_device():
            self._enter_pages(batch)
            plan = self._plan(batch)
            plan.fields.scored_indices = scored_indices
            self._copy_states(batch.state_restores)
            self._run_model(batch, plan)
            self._copy_states(batch.state_saves)

    def _run_model(self, batch: ScheduledBatch, plan: StepPlan) -> None:
        shared = self._common_prefix_len(batch)
        if self._is_captured(batch, shared):
            fields = plan.fields
            self._runner.decode(
                fields.req_pool_indices, fields.seq_lens, fields.out_cache_loc, common_prefix_len=shared
            )
            return
        output, fields_there = self._launch(batch, plan)
        if fields_there.scored_indices is not None and output.logits_of is not None:
            for part in scored_parts(fields_there.scored_indices, self._runner.vocab_size):
                output.logits_of(part)
