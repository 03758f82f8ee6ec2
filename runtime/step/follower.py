"""The steps of a rank that follows: it runs the model as rank 0 does, and leaves the choice of tokens to it."""

from __future__ import annotations

import torch

from mllm_compile.runtime.ranks.records import Choice, StepRecord
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.step.plan import StepPlan
from mllm_compile.runtime.step.runner import StepRunner


class FollowingStepRunner(StepRunner):
    """Runs the steps that rank 0 has announced. At the end of each all ranks have its tokens: rank 0 spreads what
    it has chosen, or they have chosen together."""

    def follow(self, record: StepRecord) -> None:
        """Launches a step as rank 0 has planned it."""
        batch = record.batch
        with torch.inference_mode(), self._runner.on_device():
            self._enter_pages(batch)
            plan = self._with_media(self._plan(batch), batch, record.media)
            if record.scored_indices is not None and self._deal is not None:
                plan = self._deal.with_scored(plan, record.scored_indices)
            else:
                plan.fields.scored_indices = record.scored_indices
            self._restore_states(batch.state_restores)
            self._run_model(batch, plan, record.choice)
            self._save_states(batch)

    def _run_model(self, batch: ScheduledBatch, plan: StepPlan, choice: Choice) -> None:
        shared = self._common_prefix_len(batch)
        if self._is_captured(batch, shared):
            fields = plan.fields
            deltas = None if plan.media is None else plan.media.deltas
            rows, seq_lens, slots = fields.req_pool_indices, fields.seq_lens, fields.out_cache_loc
            self._runner.decode(rows, seq_lens, slots, deltas, shared, choice is Choice.TOGETHER)
            if choice is Choice.SAMPLED:
                self._runner.spread_tokens()
            return
        output, fields_there = self._launch(batch, plan, choice)
        if fields_there.scored_indices is not None and output.logits_of is not None:
            for part in fields_there.scored_indices.split(self._scored_at_once):
                output.logits_of(part)
        if plan.sampled.size and output.is_own_part:
            self._keep_tokens(fields_there.sampled[0], self._runner.choose_together(output))
        elif plan.sampled.size:
            self._runner.spread_tokens()
