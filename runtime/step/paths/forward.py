"""The forward path: a step becomes a ForwardBatch, which the model runner runs in graphs or eagerly.

It takes any step. Its host work is one packed upload, partly to the places that captured graphs read, and one
asynchronous download.
"""

from __future__ import annotations

import numpy as np
import torch

from mllm_compile.runtime.device.packed_fields import upload_fields
from mllm_compile.runtime.device.staging import StagingRing
from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode, LogitsProcessorOutput
from mllm_compile.runtime.ranks.records import SamplingMode
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.step.paths.base import Step, StepParts, StepPath
from mllm_compile.runtime.step.plan import StepPlan
from mllm_compile.runtime.step.results import StepResults
from mllm_compile.runtime.step_fields import StepFields


class ForwardPath(StepPath):
    """See the module's header."""

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts)
        self._media, self._sources, self._images = parts.media, parts.sources, parts.images
        self._uploads = StagingRing(parts.runner.device)

    def run(self, step: Step) -> StepResults:
        self._pools.restore_states(step.batch.state_restores)
        output, fields = self._launch(step)
        step.hidden_states = output.hidden_states
        sampling, batch = self._sampling, step.batch
        sampling.follow_rows(batch)  # while the device is busy
        mask = sampling.mask(batch, step.plan)
        return sampling.sample(batch, step.plan, output, fields.sampled, fields, mask=mask)

    def follow(self, step: Step) -> None:
        self._pools.restore_states(step.batch.state_restores)
        output, fields = self._launch(step)
        self._sampling.follow(step.plan, output, fields)

    def _launch(self, step: Step) -> tuple[LogitsProcessorOutput, StepFields[torch.Tensor]]:
        """Brings the step's arrays to the device, new pages among them, and runs the model."""
        plan = step.plan
        self._pools.add_new_pages(plan.fields, step.batch)
        batch = plan.rank_batch or step.batch
        self._follow_lengths(batch, plan)
        has_lora = self._add_adapters(step.batch, batch, plan)
        takes_features = plan.media is not None and plan.media.rows.size > 0
        media = self._media.inputs(plan.media) if takes_features else None  # type: ignore[arg-type]
        fields = self._upload(plan.fields)
        if media is None and self._runner.always_takes_features:
            media = self._media.no_features(fields.positions)
        forward_batch = self._forward_batch(batch, plan, fields)
        if not batch.has_drafts:
            forward_batch.common_prefix_len = self._common_prefix.num_tokens(batch, is_captured=False)
        forward_batch.first_slot = self._first_slot(batch)
        forward_batch.source_lens_cpu = self._sources.lens(batch.rows)
        seen = self._images.seen(batch)
        if seen is not None:
            forward_batch.seen_images = seen
            forward_batch.source_kinds = upload(seen.kinds, self._runner.device)
        if media is not None:
            forward_batch.media, forward_batch.mrope_positions = media
        forward_batch.rope_lens = fields.rope_lens
        if has_lora:
            forward_batch.adapter_slots = fields.adapter_slots
            forward_batch.num_active_loras = step.batch.num_adapters
        forward_batch.dp_metadata = plan.across
        forward_batch.num_verify_tokens = batch.verify_token_ids.size
        forward_batch.greedy_across_ranks = step.choice is SamplingMode.GREEDY_ACROSS_RANKS
        if self._runner.reads_pages(forward_batch):
            self._pools.list_new_pages(fields)
            return self._runner.forward(forward_batch), fields
        try:
            return self._runner.forward(forward_batch), fields
        finally:  # the step can fail, and some of these pages belong to requests outside it
            self._pools.list_new_pages(fields)

    def _follow_lengths(self, batch: ScheduledBatch, plan: StepPlan) -> None:
        """Adds the lengths that a model's RoPE follows, where the step has prompts."""
        if self._runner.model.rope is not None and batch.num_decodes < batch.num_requests:
            plan.fields.rope_lens = np.zeros_like(plan.fields.positions)
            plan.fields.rope_lens[: batch.num_tokens] = np.repeat(batch.rope_lens, batch.num_new)

    def _upload(self, arrays: StepFields[np.ndarray]) -> StepFields[torch.Tensor]:
        """The arrays on the device; inputs of the model in the graphs' own places if they fit."""
        device, graphs = self._runner.device, self._runner.graph_runner
        if graphs is not None and graphs.inputs.holds(arrays.positions.size, arrays.seq_lens.size):
            return graphs.inputs.upload(arrays)
        return StepFields(**upload_fields(arrays.inputs() | arrays.others(), self._uploads, device))

    def _first_slot(self, batch: ScheduledBatch) -> int | None:
        """The slot of the first token of a step's only prompt, where all its pages follow each other; None of one
        without a prefix."""
        if batch.num_requests - batch.num_decodes != 1 or not batch.prefix_lens[-1]:
            return None
        return self._pools.first_slot_in_a_row(int(batch.rows[-1]), int(batch.seq_lens[-1]))

    def _forward_batch(self, batch: ScheduledBatch, plan: StepPlan, fields: StepFields[torch.Tensor]) -> ForwardBatch:
        rows, input_ids = fields.req_pool_indices, fields.input_ids
        if batch.num_decodes and not batch.has_drafts:
            self._runner.await_tokens(batch.rows[: batch.num_decodes])
            self._sampling.take_last_tokens(rows[: batch.num_decodes], out=input_ids[: batch.num_decodes])
        if plan.is_decode:
            forward_batch = self._runner.prepare_forward_batch_decode(
                input_ids,
                rows,
                fields.seq_lens,
                fields.out_cache_loc,
                seq_lens_cpu=torch.from_numpy(plan.fields.seq_lens.astype(np.int32, copy=False)),
                return_logprob=fields.scored_indices is not None,
                positions=fields.positions,
            )
            forward_batch.logits_indices = fields.logits_indices
            if plan.rank_batch is not None and plan.rank_batch.is_idle:
                forward_batch.forward_mode = ForwardMode.IDLE
            return forward_batch
        num_new, prefix_lens = fields.num_new, fields.prefix_lens
        assert num_new is not None and prefix_lens is not None, "a plan that is no decode has both"
        forward_batch = self._runner.prepare_forward_batch_extend(
            input_ids,
            rows,
            fields.seq_lens,
            num_new,
            prefix_lens,
            fields.out_cache_loc,
            num_decodes=batch.num_decodes,
            is_target_verify=batch.num_decodes == batch.num_requests,
            extend_seq_lens_cpu=torch.from_numpy(batch.num_new.copy()),
            extend_prefix_lens_cpu=torch.from_numpy(batch.prefix_lens.copy()),
            return_logprob=fields.scored_indices is not None,
            positions=fields.positions,
        )
        forward_batch.logits_indices = fields.logits_indices
        return forward_batch
