"""The drafter that guesses all tokens of a draft in one pass of a head (P-EAGLE, DFlash): masks stand for them.

P-EAGLE reads, as EAGLE does, tokens beside the hidden states before them; masks follow. DFlash reads hidden states in
rows of their own, then a block: the newest token and masks. A block's rows see all of it, so each is a request of its
own to attention, of the same pages and length. Keys of masks stay until what is accepted there replaces them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from mllm_compile.runtime.cuda_graph.model import ChainedDrafts
from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.forward_batch import ForwardBatch
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.sampling.params import NO_TOKEN
from mllm_compile.runtime.speculation.block import DraftBlock
from mllm_compile.runtime.speculation.drafter import Asked, Draft
from mllm_compile.runtime.step.draft_model import DraftRow
from mllm_compile.runtime.step.hidden_drafter import HiddenDrafter, Part
from mllm_compile.runtime.step.host_page_table import HostPageTable


class ParallelDrafter(HiddenDrafter):
    """See the module's header."""

    def __init__(
        self, model: ModelRunner, pages: HostPageTable, chain: ChainedDrafts | None, block: DraftBlock
    ) -> None:
        super().__init__(model, pages, chain)
        self._block = block
        if block.sees_ahead:
            self.keys_reach = 0

    # Behind a step of the model ---------------------------------------------------------------------------------------

    def _read(self, parts: Sequence[Part], hidden_states: torch.Tensor) -> None:
        if self._block.sees_ahead:
            parts = [part._replace(token_ids=[NO_TOKEN] * len(part.token_ids)) for part in parts]
        super()._read(parts, hidden_states)

    def _first_rows(self, asked: Sequence[Asked]) -> list[DraftRow]:
        rows, room = [], self._most_tokens
        if self._block.sees_ahead:  # then each row is a request to attention
            room = min(room, self._model.config.max_attended)
        for row in super()._first_rows(asked):
            row = replace(row, most=min(row.most, self._block.most))
            room -= len(row.token_ids) + 1 + row.most
            if room >= 0:
                rows.append(row)
        return rows

    def _draft(self, rows: Sequence[DraftRow]) -> torch.Tensor:
        block = self._block
        most = np.array([row.most for row in rows])
        num_read = np.array([_num_read(row) for row in rows])
        num_behind = most - block.from_newest + block.sees_ahead  # masks, and the newest token where it has a row
        starts = np.array([row.start for row in rows])
        of_row = np.array([row.asked.request.row for row in rows], dtype=np.int64)
        num_new = num_read + num_behind
        batch = self._block_batch(rows, of_row, starts, num_new) if block.sees_ahead else self._chain(rows, of_row)
        ends = np.cumsum(num_new)
        is_read = np.arange(ends[-1]) < (ends - num_behind).repeat(num_new)
        batch.hidden_states = self._hidden_of(rows, is_read)
        drafted = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, most, strict=True)])
        batch.logits_indices = upload(drafted, self._model.device)
        logits = self._model.forward(batch).next_token_logits
        places = np.concatenate([np.arange(count) for count in most])
        lengths = np.array([row.asked.num_computed for row in rows]).repeat(most)
        tokens = self._chosen(logits, of_row.repeat(most), lengths + 1 + places)
        drafts = torch.full((len(rows), int(most.max())), NO_TOKEN, dtype=torch.int64, device=self._model.device)
        drafts[upload(np.arange(len(rows)).repeat(most), drafts.device), upload(places, drafts.device)] = tokens
        return drafts

    def _chain(self, rows: Sequence[DraftRow], of_row: np.ndarray) -> ForwardBatch:
        """P-EAGLE's pass: a request's tokens, and masks."""
        ids = [[*row.token_ids, *[self._block.mask_token_id] * self._block.num_masks(row.most)] for row in rows]
        num_new = np.array([len(one) for one in ids], dtype=np.int32)
        starts = np.array([row.start for row in rows], dtype=np.int32)
        return self._extend(np.concatenate(ids).astype(np.int64), of_row, num_new, starts)

    def _block_batch(
        self, rows: Sequence[DraftRow], of_row: np.ndarray, starts: np.ndarray, num_new: np.ndarray
    ) -> ForwardBatch:
        """DFlash's pass: a request's hidden states, its newest token, and masks; each sees all that the last does."""
        ids: list[int] = []
        for row in rows:
            masks = [self._block.mask_token_id] * self._block.num_masks(row.most)
            ids += [*[NO_TOKEN] * _num_read(row), row.token_ids[-1], *masks]
        token_ids, lengths = np.array(ids, dtype=np.int64), (starts + num_new).repeat(num_new).astype(np.int32)
        positions = np.arange(token_ids.size) + (starts - (np.cumsum(num_new) - num_new)).repeat(num_new)
        ones = np.ones(token_ids.size, dtype=np.int32)
        batch = self._extend(token_ids, of_row.repeat(num_new), ones, lengths - ones, positions)
        batch.sees_ahead = True
        return batch

    def _hidden_of(self, rows: Sequence[DraftRow], is_read: np.ndarray) -> torch.Tensor:
        """[T, hidden] of all rows: those that are kept of `is_read` ones; of the others what masks have."""
        kept = self._kept_of([Part(row.asked.request.row, row.start, _num_read(row), ()) for row in rows])
        project = self._model.model.projection
        mask = None if project is None else project.mask
        read = self._projected(kept if mask is None else torch.cat([kept, mask[None].to(kept.dtype)]))
        hidden = read.new_zeros((is_read.size, read.shape[1]))
        if mask is not None:
            hidden[:], read = read[-1], read[:-1]
        return hidden.index_copy_(0, self._indices(np.flatnonzero(is_read)), read)

    def _taken(self, row: DraftRow, token_ids: Sequence[int]) -> Draft:
        draft = super()._taken(row, token_ids)
        self._computed[row.asked.request] = row.asked.num_computed
        return draft

    def _chosen(self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """[S] int64: the tokens that the model would choose of these logits. Penalties do not count the draft."""
        flags = replace(self._state.flags, max_logprobs=None, needs_all_logprobs=False)
        between = torch.full((rows.size, 1), NO_TOKEN, dtype=torch.int64, device=logits.device)
        given = upload(rows, logits.device), flags, upload(positions, logits.device)
        return self._sampler(logits, self._state, *given, mask=None, drafted=between).token_ids


def _num_read(row: DraftRow) -> int:
    """Hidden states that a request's pass reads."""
    return row.asked.num_computed - row.start
