"""The drafter that is a model. Its keys are in pages of the model's ids: page tables and prefix hits are shared.

Prompts enter its keys when the model computes them. Ahead of a verify step it computes the tokens that it lacks, one or
two of each request. Then it computes a token of all requests at a time. Of a cached prefix it computes what it has no
keys of: the pages of an answer that was decoded without drafts lack them. A draw uses the seed of the model's draw at
that position, so that the two agree more often (Daliri et al., arXiv 2408.07978).

Shape legend: R requests that get drafts, K most tokens of a draft, T tokens of a pass.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from mllm_compile.runtime.device.packed_fields import upload_fields
from mllm_compile.runtime.device.staging import StagingRing
from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.forward_batch import ForwardBatch
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.sampling.params import NO_TOKEN
from mllm_compile.runtime.sampling.sampler import Sampler
from mllm_compile.runtime.sampling.state import SamplingState
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.speculation.drafter import Asked, Draft, DraftedRequest
from mllm_compile.runtime.step.host_page_table import HostPageTable
from mllm_compile.runtime.step.written_pages import WrittenPages
from mllm_compile.runtime.step_fields import StepFields

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class DraftRow:
    """A request in the first pass.

    Attributes:
        token_ids: what the draft model has no keys of, its last token behind.
        start: the position of the first.
        most: tokens that are drafted behind; 0: the request only catches up.
    """

    asked: Asked
    token_ids: Sequence[int]
    start: int
    most: int


class ModelDrafter:
    """See the module's header. Used by one thread."""

    keeps_keys = True
    keys_reach = 0
    _ahead = 0  # positions between a pass's last token and its own, for the drafter's keys

    def __init__(self, model: ModelRunner, pages: HostPageTable) -> None:
        """
        Args:
            model: the draft model.
            pages: of all rows, for both models.
        """
        self._model, self._pages = model, pages
        self._models = (model, *model.drafters)  # each drafts on from the one before
        self._sampler = Sampler(model.model.sampling)
        self._state: SamplingState = model.row_state.sampling
        self._uploads = StagingRing(model.device)
        self._computed: dict[DraftedRequest, int] = {}  # tokens whose keys the draft model has
        self._broken: set[DraftedRequest] = set()  # its logits were no numbers
        self._written = WrittenPages(model.token_to_kv_pool.num_pages, pages)

    # Prompts ----------------------------------------------------------------------------------------------------------

    def follow(self, batch: ScheduledBatch, hidden_states: torch.Tensor | None) -> None:
        """Computes the prompts of a step that the model was launched for. Launches without waiting for the device.

        Args:
            hidden_states: [T, …] of the step's tokens, where the model gives some.
        """
        self._written.begin(batch.rows, batch.prefix_lens, batch.seq_lens)
        for request in batch.admitted:
            self._computed.pop(request, None)
        parts = self._prompt_parts(batch) if batch.num_prompt_tokens else []
        if not parts:
            return
        rows, starts, token_ids = zip(*parts, strict=True)
        num_new = np.array([ids.size for ids in token_ids], dtype=np.int32)
        starts_of = np.array(starts, dtype=np.int32)
        forward_batch = self._extend(np.concatenate(token_ids), np.array(rows, dtype=np.int64), num_new, starts_of)
        forward_batch.logits_indices = torch.zeros(1, dtype=torch.int64, device=self._model.device)  # none is used
        self._model.forward(forward_batch)

    def _prompt_parts(self, batch: ScheduledBatch) -> list[tuple[int, int, np.ndarray]]:
        """(row, start, tokens [n] int64) of the step's prompts, and of what their cached prefixes lack. Where a pass
        has no room for that, the first pass of a draft has."""
        parts: list[tuple[int, int, np.ndarray]] = []
        room = self._model.config.runtime.max_num_batched_tokens - batch.num_prompt_tokens
        place = 0  # of the request's tokens among those of prompts
        for index in range(batch.num_decodes, batch.num_requests):
            request, row, start = batch.requests[index], int(batch.rows[index]), int(batch.prefix_lens[index])
            token_ids = batch.prefill_token_ids[place : place + int(batch.num_new[index])]
            place += token_ids.size
            known = self._computed.get(request)
            if known is None:
                known = self._computed[request] = self._written.num_written(row, start)
            if start - known > room:
                continue
            room -= start - known
            end = start + token_ids.size
            if known < start:
                token_ids = np.concatenate([np.array(tokens_of(request, known, start), dtype=np.int64), token_ids])
            parts.append((row, known, token_ids))
            self._computed[request] = end
            self._written.end(row, end)
        return parts

    def catch_up(self, batch: ScheduledBatch) -> None:
        """Called ahead of a verify step, where a pass behind such steps is captured (cuda_graph/draft_chain.py)."""

    # Drafts -----------------------------------------------------------------------------------------------------------

    def propose(self, asked: Sequence[Asked]) -> list[Draft]:
        """Drafts as the interface says, and waits for the device. Without memory for it drafts are empty."""
        rows = self._first_rows(asked)
        if not rows:
            return [()] * len(asked)
        with torch.inference_mode(), self._model.on_device():
            try:
                self.settle()  # drafts may have pages that others gave up
                self._enter_pages(rows)
                token_ids = self._draft(rows).tolist()
            except torch.OutOfMemoryError as error:
                logger.warning("no tokens are drafted in a step: the draft model ran out of memory (%s)", error)
                return [()] * len(asked)
            found = {row.asked.request: self._taken(row, ids) for row, ids in zip(rows, token_ids, strict=True)}
        return [found.get(one.request, ()) for one in asked]

    def leave(self, request: DraftedRequest) -> None:
        computed = self._computed.get(request)
        if computed is not None and request not in self._broken:
            self._written.end(request.row, min(computed, num_tokens_of(request) - 1))

    def settle(self) -> None:
        """Called ahead of a step, while pages that requests gave up hold what they held: writes the keys that they
        lack."""

    def end(self, request: DraftedRequest) -> None:
        self._computed.pop(request, None)
        self._broken.discard(request)

    def _first_rows(self, asked: Sequence[Asked]) -> list[DraftRow]:
        """The first pass: as many of the tokens that lack keys as a step holds."""
        rows, room = [], self._model.config.runtime.max_num_batched_tokens
        for one in asked:
            if one.request in self._broken or not room:
                continue
            # Behind tokens that were drafted in vain there may be more keys.
            start = min(self._computed.get(one.request, 0), one.num_computed)
            self._written.end(one.request.row, start)
            num_lacking = one.num_computed + 1 - start
            num_new = min(num_lacking, room)
            room -= num_new
            ids = _newest(one.request, num_lacking)[:num_new]
            rows.append(DraftRow(one, ids, start, one.most if num_new == num_lacking else 0))
        return rows

    def _enter_pages(self, rows: Sequence[DraftRow]) -> None:
        """Enters the pages that requests get with this step, which the step enters again."""
        page_size = self._pages.page_size
        firsts = [row.asked.num_computed // page_size for row in rows]
        ends = [(row.asked.num_computed + row.asked.most) // page_size + 1 for row in rows]
        counts = np.array(ends) - np.array(firsts)
        of_rows = np.array([row.asked.request.row for row in rows]).repeat(counts)
        positions = np.concatenate([np.arange(*bounds) for bounds in zip(firsts, ends, strict=True)])
        parts = zip(rows, firsts, ends, strict=True)
        page_ids = np.concatenate([row.asked.pages[first:end] for row, first, end in parts])
        self._pages.write(of_rows, positions, page_ids)
        places, slots = self._pages.places_of(of_rows, positions), self._pages.slots_of(page_ids)
        fields = upload_fields({"page_places": places, "page_slots": slots}, self._uploads, self._model.device)
        self._model.req_to_token_pool.write_page_slots(fields["page_places"], fields["page_slots"])

    def _draft(self, rows: Sequence[DraftRow]) -> torch.Tensor:
        """[R, K] int64: the drafts, negative behind their ends."""
        most = np.array([row.most for row in rows])
        row_ids = np.array([row.asked.request.row for row in rows], dtype=np.int64)
        ends = np.array([row.start + len(row.token_ids) for row in rows], dtype=np.int32)
        drafts = torch.full((len(rows), int(most.max())), NO_TOKEN, dtype=torch.int64, device=self._model.device)
        batch = self._first_batch(rows, row_ids, ends)
        logits = self._run(batch, np.arange(len(rows)))
        if not drafts.shape[1]:
            return drafts
        drafts[:, 0] = self._choose(logits, batch, drafts)
        if not most.all():
            drafts.masked_fill_((upload(most, self._model.device) == 0)[:, None], NO_TOKEN)
        for number in range(1, drafts.shape[1]):
            wanted = np.flatnonzero(most > number)
            places = upload(wanted, self._model.device)
            batch = self._one_each(row_ids[wanted], ends[wanted] + number, np.zeros(wanted.size, dtype=np.int64))
            torch.index_select(drafts[:, number - 1].clamp(min=0), 0, places, out=batch.input_ids)
            logits = self._run(batch, wanted)
            drafts[places, number] = self._choose(logits, batch, drafts[places])
        return drafts

    def _run(self, batch: ForwardBatch, places: np.ndarray) -> torch.Tensor:
        """Runs a pass of some of the rows; returns the logits of each one's last token."""
        return self._model.forward(batch).next_token_logits

    def _choose(self, logits: torch.Tensor, batch: ForwardBatch, before: torch.Tensor, depth: int = 0) -> torch.Tensor:
        """[R] int64: the tokens that the model would choose of these logits, behind what is drafted; `depth` tokens
        behind those that follow the batch's."""
        flags = replace(self._state.flags, max_logprobs=None, needs_all_logprobs=False)
        positions = batch.seq_lens + self._ahead + depth
        sampled = self._sampler(
            logits, self._state, batch.req_pool_indices, flags, positions, mask=None, drafted=before
        )
        return sampled.token_ids

    def _taken(self, row: DraftRow, token_ids: Sequence[int]) -> Draft:
        """The draft of a request, up to the first that is none."""
        asked = row.asked
        count = next((place for place, token in enumerate(token_ids) if token < 0), len(token_ids))
        # The last drafted token has no keys yet.
        self._computed[asked.request] = row.start + len(row.token_ids) + max(row.most - 1, 0)
        if row.most and not count:
            self._give_up(asked)
        return token_ids[:count]

    def _give_up(self, asked: Asked) -> None:
        """Clears a request's pages of the draft model, which may hold NaN: it gets no more drafts."""
        self._broken.add(asked.request)
        num_pages = (asked.num_computed + asked.most) // self._pages.page_size + 1
        self._written.clear(asked.pages[:num_pages])
        pages = upload(asked.pages[:num_pages].astype(np.int64), self._model.device)
        for model in self._models:
            model.token_to_kv_pool.clear_pages(pages)

    # Passes -----------------------------------------------------------------------------------------------------------

    def _first_batch(self, rows: Sequence[DraftRow], row_ids: np.ndarray, ends: np.ndarray) -> ForwardBatch:
        token_ids = np.concatenate([np.array(row.token_ids, dtype=np.int64) for row in rows])
        if token_ids.size > len(rows):
            num_new = np.array([len(row.token_ids) for row in rows], dtype=np.int32)
            return self._extend(token_ids, row_ids, num_new, ends - num_new)
        return self._one_each(row_ids, ends, token_ids)

    def _one_each(self, rows: np.ndarray, seq_lens: np.ndarray, token_ids: np.ndarray) -> ForwardBatch:
        """A batch of one token a request."""
        positions = seq_lens.astype(np.int64) - 1
        fields = {
            "input_ids": token_ids,
            "positions": positions,
            "out_cache_loc": self._pages.slots(rows, positions),
            "req_pool_indices": rows,
            "seq_lens": seq_lens,
        }
        given = StepFields(**upload_fields(fields, self._uploads, self._model.device))
        return self._model.prepare_forward_batch_decode(
            given.input_ids,
            given.req_pool_indices,
            given.seq_lens,
            given.out_cache_loc,
            positions=given.positions,
            seq_lens_cpu=torch.from_numpy(seq_lens.astype(np.int32)),
        )

    def _extend(
        self,
        token_ids: np.ndarray,
        rows: np.ndarray,
        num_new: np.ndarray,
        starts: np.ndarray,
        positions: np.ndarray | None = None,
        model: ModelRunner | None = None,
    ) -> ForwardBatch:
        """A batch of several tokens a request, request after request.

        Args:
            token_ids: [T]; rows, num_new: [R]; starts: [R] the tokens of each request before them.
            positions: [T]; None: those behind `starts`.
            model: that the batch is for; None: the first.
        """
        if positions is None:
            ends = np.cumsum(num_new, dtype=np.int64)
            positions = np.arange(token_ids.size) + (starts - (ends - num_new)).repeat(num_new)
        fields = {
            "input_ids": token_ids,
            "positions": positions,
            "out_cache_loc": self._pages.slots(rows.repeat(num_new), positions),
            "req_pool_indices": rows,
            "seq_lens": starts + num_new,
            "num_new": num_new,
            "prefix_lens": starts,
        }
        given = StepFields(**upload_fields(fields, self._uploads, self._model.device))
        assert given.num_new is not None and given.prefix_lens is not None, "they are among the fields"
        return (model or self._model).prepare_forward_batch_extend(
            given.input_ids,
            given.req_pool_indices,
            given.seq_lens,
            given.num_new,
            given.prefix_lens,
            given.out_cache_loc,
            positions=given.positions,
            extend_seq_lens_cpu=torch.from_numpy(num_new.astype(np.int32)),
            extend_prefix_lens_cpu=torch.from_numpy(starts.astype(np.int32)),
        )


def num_tokens_of(request: DraftedRequest) -> int:
    """Tokens of a request that the host knows."""
    return len(request.prompt_token_ids) + len(request.output_token_ids)


def tokens_of(request: DraftedRequest, start: int, end: int) -> list[int]:
    """A request's tokens from `start` on."""
    count = len(request.prompt_token_ids)
    output = request.output_token_ids[max(0, start - count) : max(0, end - count)]
    return [*request.prompt_token_ids[start:end], *output]


def _newest(request: DraftedRequest, count: int) -> Sequence[int]:
    """The last `count` tokens of a request."""
    output = request.output_token_ids
    if count <= len(output):
        return output[len(output) - count :]
    prompt = request.prompt_token_ids
    return [*prompt[len(prompt) - (count - len(output)) :], *output]
