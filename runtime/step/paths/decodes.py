"""Captured decodes: a step is one launch of a graph that reads its inputs from the host and chooses its own tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mllm_compile.runtime.forward_batch import LogitsProcessorOutput
from mllm_compile.runtime.ranks.records import SamplingMode
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.step.paths.base import Step, StepParts, StepPath
from mllm_compile.runtime.step.plan import StepPlan
from mllm_compile.runtime.step.results import StepResults

if TYPE_CHECKING:
    from mllm_compile.runtime.cuda_graph.decodes import CapturedDecode, DecodeGraphs


class DecodePath(StepPath):
    """See the module's header. The device's table of slots hears of a new page by the slot of its first token."""

    def __init__(self, parts: StepParts, graphs: DecodeGraphs) -> None:
        super().__init__(parts)
        self._graphs = graphs

    def plan(self, batch: ScheduledBatch) -> StepPlan:
        return self._planner.plan_decodes(batch)

    def run(self, step: Step) -> StepResults:
        self._pools.restore_states(step.batch.state_restores)
        self._sampling.follow_rows(step.batch)
        self._sampling.state.flush()
        return self._results(step, self._launch(step))

    def follow(self, step: Step) -> None:
        self._pools.restore_states(step.batch.state_restores)
        self._launch(step)
        if step.choice is SamplingMode.SAMPLED:
            self._runner.broadcast_tokens()

    def _launch(self, step: Step) -> CapturedDecode:
        """Writes the step's inputs to the host's memory of the next replay, and launches it."""
        batch, plan, shared = step.batch, step.plan, 0
        has_lora = self._follow_adapters(batch)
        if batch.num_requests <= self._graphs.most_sharing:
            shared = self._common_prefix.num_tokens(batch, is_captured=True)
        return self._graphs.launch(
            plan.fields.req_pool_indices,
            plan.fields.seq_lens,
            plan.fields.out_cache_loc,
            None if plan.media is None else plan.media.deltas,
            shared,
            step.choice is SamplingMode.GREEDY_ACROSS_RANKS,
            has_lora,
        )

    def _results(self, step: Step, decode: CapturedDecode) -> StepResults:
        batch, plan, sampling = step.batch, step.plan, self._sampling
        flags, mask = sampling.state.flags, sampling.mask(batch, plan)
        if not flags.chooses_plainly or mask is not None:  # then the graph's choice is not used
            output = LogitsProcessorOutput(decode.logits)
            return sampling.sample(batch, plan, output, (decode.rows, decode.seq_lens), mask=mask)
        scores = sampling.score(batch, plan, decode.logits, decode.tokens, decode.rows)
        if step.choice is SamplingMode.SAMPLED:
            self._runner.broadcast_tokens()  # followers are told of this ahead of the masks
        tokens = decode.slot.tokens[: plan.fields.req_pool_indices.size]
        return StepResults(decode.slot, tokens, scores)
