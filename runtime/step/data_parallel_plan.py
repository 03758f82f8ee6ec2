"""Plans a step of ranks that have requests of their own: what this rank computes, and which logits are whose.

Every rank is given the whole step and makes its own part, so each knows how many tokens the others have. The logits of
all ranks are gathered, a block a rank, each as long as the largest needs. StepPlan.token_indices says where the sampled
ones are among them. Free of torch.

Shape legend: N ranks, S rows of logits of a rank, R requests of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from mllm_compile.runtime.graph_mode import DPMetadata
from mllm_compile.runtime.media.step_plan import MediaPlan
from mllm_compile.runtime.schedule.data_parallel import batch_of_rank, ranks_of
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.step.host_page_table import HostPageTable
from mllm_compile.runtime.step.plan import (
    Planner,
    StepPlan,
    num_top,
    plan_runs,
    plan_step,
    prompt_positions,
    token_positions,
    with_media,
)
from mllm_compile.runtime.step_fields import StepFields


@dataclass(frozen=True, slots=True)
class DataParallelStep:
    """The data-parallel ranks of a step.

    Attributes:
        rank: this one.
        rows_of_rank: most requests of each.
        scored_at_once: most tokens of each whose logits are made at a time, beside sampled ones.
    """

    rank: int
    num_ranks: int
    rows_of_rank: int
    scored_at_once: int

    def plan(self, batch: ScheduledBatch, pages: HostPageTable) -> StepPlan:
        """Plans a step that is not captured whole.

        Args:
            pages: the page table, the batch's own writes included.
        """
        rank_batch = batch_of_rank(batch, self.rank, self.rows_of_rank)
        plan = plan_step(rank_batch, pages)
        fields = plan.fields
        sampled, lengths, runs = np.flatnonzero(batch.sample_mask), batch.seq_lens, None
        positions = lengths[sampled]
        if batch.has_drafts:
            sampled, last_tokens, runs = plan_runs(batch, np.cumsum(batch.num_new, dtype=np.int64))
            positions = token_positions(batch)[last_tokens] + 1
        places, size = self._blocks(batch.rows[sampled])
        ends = np.arange(rank_batch.num_requests) if fields.logits_indices is None else fields.logits_indices
        fields.logits_indices = np.zeros(size, dtype=np.int64)
        fields.logits_indices[: ends.size] = ends  # a rank without any gives a row that nobody looks at
        fields.sampled_rows, fields.sampled_positions = np.zeros((2, self.num_ranks * size), dtype=np.int64)
        fields.sampled_rows[places] = batch.rows[sampled]
        fields.sampled_positions[places] = positions
        fields.run_indices = None if runs is None else places[runs.places].ravel()
        fields.draft_ids = None if runs is None else runs.draft_ids.ravel()
        across = self._across(batch)
        plan = replace(plan, sampled=sampled, token_indices=places, runs=runs, rank_batch=rank_batch, across=across)
        return self._with_scores(plan, batch) if batch.prompt_logprob_rows.any() else plan

    def _with_scores(self, plan: StepPlan, batch: ScheduledBatch) -> StepPlan:
        """Adds the prompt positions of all ranks that are scored, which rank 0 alone knows."""
        found = []
        for rank in range(self.num_ranks):
            rank_batch = batch_of_rank(batch, rank, self.rows_of_rank)
            starts = np.cumsum(rank_batch.num_new, dtype=np.int64) - rank_batch.num_new
            rows, indices, targets = prompt_positions(rank_batch, starts)
            found.append((np.flatnonzero(ranks_of(batch.rows, self.rows_of_rank) == rank)[rows], indices, targets))
        size = max(indices.size for _, indices, _ in found)
        if not size:
            return plan
        scored, all_targets = np.zeros((2, self.num_ranks * size), dtype=np.int64)
        places = [self._scored_places(rank, size)[: targets.size] for rank, (*_, targets) in enumerate(found)]
        for rank, (_, indices, targets) in enumerate(found):
            scored[rank * size : rank * size + indices.size] = indices
            all_targets[places[rank]] = targets
        every_row = np.concatenate([rows for rows, *_ in found])
        order = np.argsort(every_row, kind="stable")
        plan.fields.prompt_targets = all_targets
        prompt_rows = every_row[order]
        return self.with_scored(
            replace(
                plan,
                score_indices=np.concatenate(places)[order],
                prompt_rows=prompt_rows,
                prompt_num_top=num_top(batch, prompt_rows),
            ),
            scored,
        )

    def with_media(self, plan: StepPlan, batch: ScheduledBatch, media: MediaPlan | None) -> StepPlan:
        """The plan with the positions that images make, and what of the step's features is the rank's.

        Args:
            media: of the whole step.
        """
        if media is None:
            return plan
        if plan.runs is not None and plan.rank_batch is None:  # a captured verify step, which has all requests
            return with_media(plan, media)
        if plan.rank_batch is None:  # a captured decode, which has the rows of all ranks
            deltas = np.zeros(plan.fields.seq_lens.size, dtype=media.deltas.dtype)
            deltas[plan.token_indices] = media.deltas
            return replace(plan, media=MediaPlan(plan.fields.positions, deltas))
        is_own = ranks_of(batch.rows, self.rows_of_rank) == self.rank
        own = media.part(np.flatnonzero(is_own), np.flatnonzero(np.repeat(is_own, batch.num_new)))
        return with_media(plan, own)

    def with_scored(self, plan: StepPlan, scored: np.ndarray) -> StepPlan:
        """The plan with the tokens whose logits are asked for besides, a block of each rank."""
        plan.fields.scored_indices = scored.reshape(self.num_ranks, -1)[self.rank]
        return replace(plan, scored=scored)

    def _scored_places(self, rank: int, size: int) -> np.ndarray:
        """[size] places of a rank's logits among the gathered ones of all ranks, `size` each.

        They are gathered `scored_at_once` a rank at a time.
        """
        index = np.arange(size)
        turn, within = np.divmod(index, self.scored_at_once)
        length = np.minimum(self.scored_at_once, size - turn * self.scored_at_once)
        places: np.ndarray = turn * self.scored_at_once * self.num_ranks + rank * length + within
        return places

    def plan_decode(self, batch: ScheduledBatch, pages: HostPageTable, size: int, padding_len: int) -> StepPlan:
        """Plans a step of decodes that is captured for `size` requests of each rank.

        Args:
            pages: as `plan` takes them.
            padding_len: tokens that a row of padding has.
        """
        places, _ = self._blocks(batch.rows, size)
        rows, positions, slots = np.zeros((3, self.num_ranks * size), dtype=np.int64)
        seq_lens = np.full(self.num_ranks * size, padding_len, dtype=np.int32)
        rows[places], seq_lens[places] = batch.rows, batch.seq_lens
        positions[places] = batch.seq_lens - 1
        slots[places] = pages.slots(batch.rows, batch.seq_lens - 1)
        fields: StepFields[np.ndarray] = StepFields(
            input_ids=np.zeros_like(positions),
            positions=positions,
            out_cache_loc=slots,
            req_pool_indices=rows,
            seq_lens=seq_lens,
        )
        return StepPlan(
            fields=fields,
            is_decode=True,
            sampled=np.arange(batch.num_requests),
            token_indices=places,
            score_indices=_NONE,
            prompt_rows=_NONE,
            prompt_num_top=0,
            across=self._across(batch),
        )

    def most_requests(self, batch: ScheduledBatch) -> int:
        """Requests of the rank that has most."""
        return int(np.bincount(ranks_of(batch.rows, self.rows_of_rank)).max())

    def blocks(self, batch: ScheduledBatch, size: int) -> tuple[np.ndarray, int]:
        """Places of requests in blocks of `size` rows a rank, and the rows of all ranks; see Planner.blocks."""
        return self._blocks(batch.rows, size)[0], self.num_ranks * size

    def _across(self, batch: ScheduledBatch) -> DPMetadata:
        counts = np.bincount(ranks_of(batch.rows, self.rows_of_rank), batch.num_new, self.num_ranks)
        return DPMetadata(tuple(counts.astype(np.int64).tolist()))

    def _blocks(self, rows: np.ndarray, size: int | None = None) -> tuple[np.ndarray, int]:
        """Where rows are in blocks of `size` rows a rank, each rank's in their order; by default as few as hold them,
        and one at least."""
        ranks = ranks_of(rows, self.rows_of_rank)
        counts = np.bincount(ranks, minlength=self.num_ranks)
        size = max(1, int(counts.max())) if size is None else size
        order = np.argsort(ranks, kind="stable")
        within = np.empty_like(order)
        within[order] = np.arange(order.size) - np.repeat(np.cumsum(counts) - counts, counts)
        return ranks * size + within, size


class DecodeSizes(Protocol):
    """Captured decodes, as far as a plan of one asks (cuda_graph/decodes.py)."""

    @property
    def padding_len(self) -> int: ...

    def padded_requests(self, num_requests: int) -> int: ...


class DataParallelPlanner(Planner):
    """Plans the steps of one data-parallel rank."""

    def __init__(self, pages: HostPageTable, dp_step: DataParallelStep, decodes: DecodeSizes | None) -> None:
        super().__init__(pages)
        self._dp_step, self._decodes = dp_step, decodes

    def most_requests(self, batch: ScheduledBatch) -> int:
        return self._dp_step.most_requests(batch)

    def plan(self, batch: ScheduledBatch) -> StepPlan:
        return self._dp_step.plan(batch, self._pages)

    def plan_decodes(self, batch: ScheduledBatch) -> StepPlan:
        """
        Raises:
            RuntimeError: none are captured for so many requests.
        """
        if self._decodes is None:
            raise RuntimeError("no decodes are captured")
        size = self._decodes.padded_requests(self._dp_step.most_requests(batch))
        return self._dp_step.plan_decode(batch, self._pages, size, self._decodes.padding_len)

    def blocks(self, batch: ScheduledBatch, size: int) -> tuple[np.ndarray, int]:
        return self._dp_step.blocks(batch, size)

    def token_positions(self, batch: ScheduledBatch, plan: StepPlan) -> np.ndarray:
        """[T] places of the whole batch; the plan is a part of it."""
        return token_positions(batch)

    def with_media(self, plan: StepPlan, batch: ScheduledBatch, media: MediaPlan | None) -> StepPlan:
        return self._dp_step.with_media(plan, batch, media)

    def with_scored(self, plan: StepPlan, scored: np.ndarray | None) -> StepPlan:
        return plan if scored is None else self._dp_step.with_scored(plan, scored)


_NONE = np.empty(0, dtype=np.int64)
