"""The drafter that reads the model's hidden states beside tokens (EAGLE, and prediction layers of models).

At position t it reads the model's hidden state there and token t + 1, and guesses token t + 2. Hidden states of prompts
it reads right behind the step that computes them. Those of decodes are kept by row until it is known which drafts are
accepted: then the first pass reads them. Further passes read the drafter's own hidden states. The next first pass
replaces their keys.

A prefix hit brings keys of another request. The last one was made with that request's next token, and stays so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.forward_batch import ForwardBatch
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.runner_config import LEAST_KEPT_HIDDEN_STATES
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.speculation.drafter import Asked, Draft, DraftedRequest
from mllm_compile.runtime.step.draft_model import DraftRow, ModelDrafter
from mllm_compile.runtime.step.host_page_table import HostPageTable


class Part(NamedTuple):
    """Tokens that a request's row reads from a position on; each token is the one behind its position."""

    row: int
    start: int
    token_ids: Sequence[int]


class HiddenDrafter(ModelDrafter):
    """See the module's header. A request's `_computed` counts positions whose keys are made of the model's hidden
    states."""

    _ahead = 1

    def __init__(self, model: ModelRunner, pages: HostPageTable) -> None:
        super().__init__(model, pages)
        self._most_tokens = model.config.runtime.max_num_batched_tokens
        self._kept: torch.Tensor | None = None  # [rows, …, n * hidden]: of each row's last steps
        self._kept_from: dict[DraftedRequest, int] = {}  # the position of the first
        self._carried: torch.Tensor  # [R, hidden]: the drafter's own, of its last pass

    # Behind a step of the model ---------------------------------------------------------------------------------------

    def follow(self, batch: ScheduledBatch, hidden_states: torch.Tensor | None) -> None:
        assert hidden_states is not None, "the model was compiled to give them"
        most = int(batch.num_new[: batch.num_decodes].max(initial=1))
        self._kept = room = self._room_for(hidden_states, max(LEAST_KEPT_HIDDEN_STATES, most))
        self._catch_up(batch)
        prompts: list[Part] = []
        read: list[int] = []  # of the step's hidden states
        kept: list[int] = []
        places: list[int] = []  # of `room`
        first = 0  # of the request's hidden states
        for index, request in enumerate(batch.requests):
            row, start, num_new = (int(values[index]) for values in (batch.rows, batch.prefix_lens, batch.num_new))
            num_read = 0
            if index >= batch.num_decodes:
                num_read = min(num_new, _num_tokens(request) - 1 - start)
                self._computed[request] = start + num_read
            if num_read:
                prompts.append(Part(row, start, _tokens(request, start + 1, start + 1 + num_read)))
                read += range(first, first + num_read)
            if index >= batch.num_decodes or self._computed.get(request, start) >= start:
                self._kept_from[request] = start + num_read
            place = row * room.shape[1] + start + num_read - self._kept_from[request]
            places += range(place, place + num_new - num_read)
            kept += range(first + num_read, first + num_new)
            first += num_new
        if kept:
            room.flatten(0, 1)[self._indices(places)] = hidden_states[self._indices(kept)]
        if prompts:
            self._read(prompts, hidden_states[self._indices(read)])

    def _room_for(self, hidden_states: torch.Tensor, most: int) -> torch.Tensor:
        """The memory of what is kept, for so many tokens of each row; with what was kept."""
        if self._kept is not None and self._kept.shape[1] >= most:
            return self._kept
        num_rows = self._model.req_to_token_pool.req_to_token.shape[0]
        room = hidden_states.new_zeros((num_rows, most, hidden_states.shape[1]))
        if self._kept is not None:
            room[:, : self._kept.shape[1]] = self._kept
        return room

    def _catch_up(self, batch: ScheduledBatch) -> None:
        """Reads what is kept of decodes that were not asked for, where there is no room to keep more of them."""
        parts, firsts = [], []
        for index, request in enumerate(batch.requests[: batch.num_decodes]):
            start, room = int(batch.prefix_lens[index]), self._kept.shape[1]  # type: ignore[union-attr]  # made just now
            if start + int(batch.num_new[index]) - self._kept_from.get(request, start) <= room:
                continue
            part = self._lacking(request, start, self._computed.get(request, start))
            if part is not None and part.token_ids:
                parts.append(part)
                firsts.append(self._kept_from[request])
            self._computed[request] = start
        num_read = 0  # parts; a pass has as many tokens as a step
        while num_read < len(parts):
            ends = np.cumsum([len(part.token_ids) for part in parts[num_read:]])
            end = num_read + max(1, int(np.searchsorted(ends, self._most_tokens, side="right")))
            self._read(parts[num_read:end], self._kept_of(parts[num_read:end], firsts[num_read:end]))
            num_read = end

    def _read(self, parts: Sequence[Part], hidden_states: torch.Tensor) -> None:
        """Makes the keys of these positions."""
        rows, starts = (np.array(values, dtype=np.int64) for values in list(zip(*parts, strict=True))[:2])
        num_new = np.array([len(part.token_ids) for part in parts], dtype=np.int32)
        token_ids = np.concatenate([np.array(part.token_ids, dtype=np.int64) for part in parts])
        batch = self._extend(token_ids, rows, num_new, starts.astype(np.int32))
        batch.logits_indices = torch.zeros(1, dtype=torch.int64, device=self._model.device)  # none is used
        batch.hidden_states = self._projected(hidden_states)
        self._model.forward(batch)

    # Drafts -----------------------------------------------------------------------------------------------------------

    def end(self, request: DraftedRequest) -> None:
        super().end(request)
        self._kept_from.pop(request, None)

    def _first_rows(self, asked: Sequence[Asked]) -> list[DraftRow]:
        rows, room = [], self._most_tokens
        for one in asked:
            newest = one.num_computed - 1
            part = self._lacking(one.request, one.num_computed, min(self._computed.get(one.request, 0), newest))
            if part is None or one.request in self._broken or len(part.token_ids) > room:
                continue
            room -= len(part.token_ids)
            rows.append(DraftRow(one, part.token_ids, part.start, one.most))
        return rows

    def _lacking(self, request: DraftedRequest, num_computed: int, start: int) -> Part | None:
        """The tokens to read from `start` on, of a request of so many computed ones; None: hidden states are not kept,
        or the host does not know the tokens."""
        if self._kept_from.get(request, start + 1) > start or _num_tokens(request) <= num_computed:
            return None
        return Part(request.row, start, _tokens(request, start + 1, num_computed + 1))

    def _taken(self, row: DraftRow, token_ids: Sequence[int]) -> Draft:
        draft = super()._taken(row, token_ids)
        self._computed[row.asked.request] = row.start + len(row.token_ids)
        return draft

    def _first_batch(self, rows: Sequence[DraftRow], row_ids: np.ndarray, ends: np.ndarray) -> ForwardBatch:
        batch = super()._first_batch(rows, row_ids, ends)
        parts = [Part(row.asked.request.row, row.start, row.token_ids) for row in rows]
        firsts = [self._kept_from[row.asked.request] for row in rows]
        batch.hidden_states = self._projected(self._kept_of(parts, firsts))
        return batch

    def _run(self, batch: ForwardBatch, places: np.ndarray) -> torch.Tensor:
        is_first = batch.hidden_states is not None
        if not is_first:
            batch.hidden_states = self._carried[upload(places, self._model.device)]
        output = self._model.forward(batch)
        hidden_states = output.hidden_states
        assert hidden_states is not None, "the draft model was compiled to give them"
        if batch.extend_seq_lens_cpu is not None:
            ends = np.cumsum(batch.extend_seq_lens_cpu.numpy(), dtype=np.int64) - 1
            hidden_states = hidden_states[upload(ends, self._model.device)]
        if is_first:
            self._carried = hidden_states.clone()  # a graph's, which the next pass writes over
        else:
            self._carried[upload(places, self._model.device)] = hidden_states
        return output.next_token_logits

    # Hidden states ----------------------------------------------------------------------------------------------------

    def _kept_of(self, parts: Sequence[Part], firsts: Sequence[int]) -> torch.Tensor:
        """[T, n * hidden] of the parts' positions; `firsts` are the positions that are kept first of each."""
        assert self._kept is not None, "a step of the model came before"
        most = self._kept.shape[1]
        places = [
            part.row * most + part.start - first + place
            for part, first in zip(parts, firsts, strict=True)
            for place in range(len(part.token_ids))
        ]
        return self._kept.flatten(0, 1)[self._indices(places)]

    def _projected(self, hidden_states: torch.Tensor) -> torch.Tensor:
        project = self._model.model.projection
        return hidden_states if project is None else project(hidden_states)

    def _indices(self, places: Sequence[int] | np.ndarray) -> torch.Tensor:
        return upload(np.array(places, dtype=np.int64), self._model.device)


def _num_tokens(request: DraftedRequest) -> int:
    """Tokens of a request that the host knows."""
    return len(request.prompt_token_ids) + len(request.output_token_ids)


def _tokens(request: DraftedRequest, start: int, end: int) -> list[int]:
    count = len(request.prompt_token_ids)
    output = request.output_token_ids[max(0, start - count) : max(0, end - count)]
    return [*request.prompt_token_ids[start:end], *output]
