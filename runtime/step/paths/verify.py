"""Captured verify steps: one launch of a graph that makes its inputs, chooses tokens and accepts drafts.

Drafts are the host's, or the device's own (ScheduledBatch.device_lens). For these the device has the text of each
request: the host brings what it lacks where such steps begin. Ranks with requests of their own have a block of the
graph's rows each.

Shape legend: R requests of the step, C tokens of each in the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from mllm_compile.runtime.device.staging import StagingBuffer
from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.ops.tokens.verify_fields import DRAFT_FIELD, VERIFY_FIELDS
from mllm_compile.runtime.ranks.records import SamplingMode
from mllm_compile.runtime.sampling.params import NO_TOKEN
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.step.paths.base import Step, StepParts, StepPath
from mllm_compile.runtime.step.plan import RunPlan, StepPlan
from mllm_compile.runtime.step.results import SampledScores, StepResults
from mllm_compile.runtime.step_fields import StepFields

if TYPE_CHECKING:
    from mllm_compile.runtime.cuda_graph.verifies import CapturedVerify, VerifyGraphs

_OF_DEVICE = -1
_NONE = np.empty(0, dtype=np.int64)


class VerifyPath(StepPath):
    """See the module's header."""

    def __init__(self, parts: StepParts, graphs: VerifyGraphs) -> None:
        super().__init__(parts)
        self._graphs = graphs
        self._texts: dict[int, tuple[Request, int]] = {}  # by row: whose text the device has, and how much of it

    def serves(self, batch: ScheduledBatch) -> bool:
        """True if a graph runs the batch: decodes alone, with drafts that fit."""
        return batch.num_decodes == batch.num_requests and self._width(batch) is not None

    def _width(self, batch: ScheduledBatch) -> int | None:
        """C of the graph that runs a batch of decodes; None: none does."""
        return self._graphs.width(self._planner.most_requests(batch), int(batch.num_new.max()))

    def plan(self, batch: ScheduledBatch) -> StepPlan:
        count, width = batch.num_requests, self._width(batch)
        if width is None:
            raise RuntimeError(f"no verify step was captured for {count} requests with {batch.num_new.max()} tokens")
        requests, most = np.arange(count), self._planner.most_requests(batch)
        places, num_rows = self._planner.blocks(batch, self._graphs.padded_requests(most, width))
        sampled_rows = np.zeros((num_rows, width), dtype=batch.rows.dtype)
        sampled_rows[places] = batch.rows[:, None]
        fields = StepFields(
            input_ids=_NONE,
            positions=np.zeros(batch.num_tokens, dtype=np.int64),  # the device makes them
            out_cache_loc=_NONE,
            req_pool_indices=batch.rows,
            seq_lens=batch.seq_lens,
            sampled_rows=sampled_rows.ravel(),
        )
        draft_ids = np.full((count, width - 1), NO_TOKEN, dtype=np.int64)
        if batch.device_lens is None:
            _write_drafts(draft_ids, batch)
        return StepPlan(
            fields=fields,
            is_decode=False,
            sampled=requests.repeat(width),
            token_indices=(places[:, None] * width + np.arange(width)).ravel(),
            score_indices=_NONE,
            prompt_rows=_NONE,
            prompt_num_top=0,
            runs=RunPlan(requests, np.arange(count * width).reshape(count, width), draft_ids),
        )

    def run(self, step: Step) -> StepResults:
        batch, plan, sampling, loop = step.batch, step.plan, self._sampling, self._graphs.loop
        shape = _shape(step)
        sampling.follow_rows(batch)
        sampling.state.flush()
        if batch.device_lens is not None and self._graphs.chain is None:  # which reads none
            self._bring_texts(batch, batch.device_lens)
        launched = self._launch(step)
        if launched.hidden_states is not None and self._graphs.chain is None:
            is_token = np.arange(shape.width) < batch.num_new[:, None]
            rows = upload(np.flatnonzero(is_token), self._runner.device)
            step.hidden_states = launched.hidden_states.index_select(0, rows)
        mask = sampling.mask(batch, plan)
        if not sampling.state.flags.chooses_plainly or mask is not None:  # then the graph's choice is not used
            scores = sampling.sample_captured(batch, plan, launched, loop, mask)
        else:
            scores = sampling.score(batch, plan, launched.logits, launched.tokens, launched.rows)
            if step.choice is SamplingMode.SAMPLED and self._runner.communicator is not None:
                loop.accept(launched.tokens.view(shape.rows, -1), None)  # others were told ahead of the masks
        results = VerifyResults(*loop.results(shape.rows), shape, scores)
        if launched.behind is not None:
            launched.behind.replay()
        return results

    def follow(self, step: Step) -> None:
        launched = self._launch(step)
        if step.choice is SamplingMode.SAMPLED:
            shape = _shape(step)
            tokens = torch.empty(shape.rows, shape.width, dtype=torch.int64, device=self._runner.device)
            self._graphs.loop.accept(tokens, None)
        if launched.behind is not None:
            launched.behind.replay()

    def _launch(self, step: Step) -> CapturedVerify:
        """Launches a step with what the device lacks, on any rank."""
        batch, plan, runs = step.batch, step.plan, step.plan.runs
        assert runs is not None, "the plan of a verify step"
        shape = _shape(step)
        self._pools.restore_states(batch.state_restores)
        self._pools.bring_new_pages(batch)
        fields = np.zeros((batch.num_requests, VERIFY_FIELDS), dtype=np.int32)
        fields[:, 0], fields[:, 2] = batch.rows, batch.num_new - 1
        if plan.media is not None:
            fields[:, 4] = plan.media.deltas
        if batch.device_lens is None:
            fields[:, 1], fields[:, 3] = batch.prefix_lens, batch.num_new - 1
            fields[:, DRAFT_FIELD : DRAFT_FIELD + shape.width - 1] = runs.draft_ids
        else:
            fields[:, 1], fields[:, 3] = batch.device_lens, _OF_DEVICE
            is_known = batch.device_lens != _OF_DEVICE
            if self._runner.communicator is not None and is_known.any():
                rows = upload(batch.rows[is_known].astype(np.int64), self._runner.device)
                self._graphs.loop.share_texts(rows, 1 + int(batch.device_lens.max()))
        of_all = np.zeros((shape.rows, VERIFY_FIELDS), dtype=np.int32)
        of_all[shape.places] = fields
        return self._graphs.launch(of_all, shape.width, self._follow_adapters(batch))

    def _bring_texts(self, batch: ScheduledBatch, lengths: np.ndarray) -> None:
        """Brings what the device lacks of the texts of requests whose length is the host's."""
        parts = []
        for index in np.flatnonzero(lengths != _OF_DEVICE).tolist():
            request, row = batch.requests[index], int(batch.rows[index])
            owner, num_known = self._texts.get(row, (None, 0))
            num_known = num_known if owner is request else 0
            num_prompt = len(request.prompt_token_ids)
            if num_known < num_prompt:
                new = request.all_token_ids[num_known:]
            else:
                new = np.array(request.output_token_ids[num_known - num_prompt :], dtype=np.int64)
            self._texts[row] = request, num_known + new.size
            parts.append((np.full(new.size, row), num_known + np.arange(new.size), new))
        if parts:
            self._graphs.loop.write_texts(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


class VerifyResults(StepResults):
    """The results of a captured verify step."""

    def __init__(
        self,
        buffer: StagingBuffer,
        results: np.ndarray,
        shape: _Shape,
        scores: SampledScores,
    ) -> None:
        """
        Args:
            buffer, results: as VerifyLoop.results gives them.
        """
        super().__init__(buffer, None, scores)
        self._results, self._shape = results, shape

    def tokens(self) -> np.ndarray:
        """The tokens as AcceptedTokens.packed has them, once the copy is over."""
        self._buffer.wait()
        results, width = self._results[self._shape.places], self._shape.width
        counts, num_drafted, chosen = results[:, 0], results[:, 1], results[:, 2 : 2 + width]
        is_of_step = np.arange(width) <= num_drafted[:, None]
        is_broken = ((chosen == NO_TOKEN) & is_of_step).any(axis=1) & (num_drafted > 0)
        return np.concatenate((chosen.ravel(), counts, is_broken))

    @property
    def num_drafted(self) -> np.ndarray:
        drafted: np.ndarray = self._results[self._shape.places, 1]
        return drafted


class _Shape(NamedTuple):
    """The rows of a graph's requests, where the step's R requests are among them, and C."""

    rows: int
    places: np.ndarray
    width: int


def _shape(step: Step) -> _Shape:
    runs, sampled_rows = step.plan.runs, step.plan.fields.sampled_rows
    assert runs is not None and sampled_rows is not None, "the plan of a verify step"
    width = runs.places.shape[1]
    return _Shape(sampled_rows.size // width, step.plan.token_indices[::width] // width, width)


def _write_drafts(places: np.ndarray, batch: ScheduledBatch) -> None:
    """Writes each request's draft into its row of `places`."""
    is_drafted = np.arange(places.shape[1]) < (batch.num_new - 1)[:, None]
    starts = np.add.accumulate(batch.num_new) - batch.num_new
    places[is_drafted] = np.delete(batch.verify_token_ids, starts)
