"""The drafter that reads the model's hidden states beside tokens (EAGLE, and prediction layers of models).

At position t it reads the model's hidden state there and token t + 1, and guesses token t + 2. Hidden states of prompts
it reads right behind the step that computes them. Those of decodes are kept by row until it is known which drafts are
accepted: then the first pass reads them. Further passes read the drafter's own hidden states. The next first pass
replaces their keys.

Prediction layers may be several. Then layer i reads the hidden states of layer i - 1 and token t + 1 + i at position t,
and guesses one token. Positions whose tokens were guessed are read again when their tokens are known.

Shape legend: R requests that get drafts, K most tokens of a draft, L layers (of EAGLE 1), T tokens of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from mllm_compile.runtime.cuda_graph.model import ChainedDrafts
from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.forward_batch import ForwardBatch
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.runner_config import LEAST_KEPT_HIDDEN_STATES
from mllm_compile.runtime.sampling.params import NO_TOKEN
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from mllm_compile.runtime.speculation.drafter import Asked, Draft, DraftedRequest
from mllm_compile.runtime.step.draft_model import DraftRow, ModelDrafter, num_tokens_of, tokens_of
from mllm_compile.runtime.step.host_page_table import HostPageTable
from mllm_compile.runtime.step.kept_hidden_states import KeptHiddenStates


class Part(NamedTuple):
    """Positions of a request's row that are read: `num_read` from `start` on.

    Attributes:
        token_ids: those behind each position, and L - 1 more.
    """

    row: int
    start: int
    num_read: int
    token_ids: Sequence[int]


class HiddenDrafter(ModelDrafter):
    """See the module's header. A request's `_computed` counts positions whose keys are made of the model's hidden
    states and known tokens, in every layer."""

    _ahead = 1

    def __init__(self, model: ModelRunner, pages: HostPageTable, chain: ChainedDrafts | None = None) -> None:
        """
        Args:
            model, pages: as ModelDrafter has them.
            chain: drafts behind captured verify steps; None: nothing does.
        """
        super().__init__(model, pages)
        self._behind = chain
        self.keys_reach = self._num_layers = len(self._models)
        self._most_tokens = model.config.runtime.max_num_batched_tokens
        self._longest = model.config.longest_kept(self._num_layers)
        self._kept = KeptHiddenStates(model.req_to_token_pool.req_to_token.shape[0])
        self._left: list[Part] = []  # of requests that gave up their pages
        self._is_whole: set[DraftedRequest] = set()  # a captured pass has made keys of all their hidden states
        self._carried: torch.Tensor  # [R, hidden]: the drafter's own, of its last pass

    # Behind a step of the model ---------------------------------------------------------------------------------------

    def follow(self, batch: ScheduledBatch, hidden_states: torch.Tensor | None) -> None:
        if hidden_states is None:  # the step's graph has read them (cuda_graph/draft_chain.py)
            self._is_whole.update(batch.requests)
            return
        for request, start in zip(batch.requests, batch.prefix_lens.tolist(), strict=True):
            if request in self._is_whole:
                self._is_whole.discard(request)
                self._computed[request] = start
        for request in batch.admitted:
            self._computed.pop(request, None)
            self._kept.forget(request)
        most = int(batch.num_new[: batch.num_decodes].max(initial=1)) + self._num_layers - 1
        is_long = most > LEAST_KEPT_HIDDEN_STATES  # then the room grows once: it is held twice meanwhile
        self._kept.make_room(hidden_states, max(self._longest, most) if is_long else LEAST_KEPT_HIDDEN_STATES)
        self._catch_up(batch)
        prompts: list[Part] = []
        read: list[np.ndarray] = []  # of the step's hidden states
        kept: list[np.ndarray] = []
        places: list[np.ndarray] = []  # of `kept`
        first = 0  # of the request's hidden states
        for index, request in enumerate(batch.requests):
            row, start, num_new = (int(values[index]) for values in (batch.rows, batch.prefix_lens, batch.num_new))
            computed = self._computed.setdefault(request, start)
            end = first + num_new
            if index >= batch.num_decodes and computed == start:
                known = min(start + num_new, num_tokens_of(request) - self._num_layers)
                if known > start:
                    prompts.append(self._part(request, row, start, known))
                    read.append(np.arange(first, first + known - start))
                    self._computed[request] = computed = known
            places.append(self._kept.extend(request, row, max(start, computed), start + num_new))
            kept.append(np.arange(end - places[-1].size, end))
            first = end
        self._kept.write(places, hidden_states[self._indices(np.concatenate(kept))])
        if prompts:
            self._read(prompts, hidden_states[self._indices(np.concatenate(read))])

    def catch_up(self, batch: ScheduledBatch) -> None:
        lengths = batch.prefix_lens if batch.device_lens is None else batch.device_lens
        decodes, parts = batch.requests[: batch.num_decodes], list[Part]()
        for request, length in zip(decodes, lengths[: batch.num_decodes].tolist(), strict=True):
            if length < 0 or request in self._is_whole:
                continue
            part = self._lacking(request, length, self._computed.get(request, 0))
            if part is not None and part.num_read:
                parts.append(part)
                self._computed[request] = length
        self._read_kept(parts)

    def _catch_up(self, batch: ScheduledBatch) -> None:
        """Reads what is kept of requests whose next positions there is no room for, and of prompts that go on."""
        parts: list[Part] = []
        for index, request in enumerate(batch.requests):
            row, start, num_new = (int(values[index]) for values in (batch.rows, batch.prefix_lens, batch.num_new))
            computed = self._computed.get(request, start)
            has_room = start + num_new - computed <= self._kept.size
            if computed >= start or (has_room and index < batch.num_decodes):
                continue
            known = min(start, num_tokens_of(request) - self._num_layers)
            if known > computed and self._kept.has(request, computed):
                parts.append(self._part(request, row, computed, known))
                computed = known
            if index < batch.num_decodes:  # what has no room is lost
                computed = max(computed, start + num_new - self._kept.size)
            self._computed[request] = computed
        self._read_kept(parts)

    def _read_kept(self, parts: Sequence[Part]) -> None:
        """Reads hidden states that are kept, of as many parts at a time as a step has room for."""
        num_read = 0
        while num_read < len(parts):
            ends = np.cumsum([part.num_read for part in parts[num_read:]])
            end = num_read + max(1, int(np.searchsorted(ends, self._most_tokens, side="right")))
            self._read(parts[num_read:end], self._kept_of(parts[num_read:end]))
            num_read = end

    def _read(self, parts: Sequence[Part], hidden_states: torch.Tensor) -> None:
        """Makes the keys of these positions, of hidden states [T, n * hidden]."""
        rows, starts, num_new = (np.array(values, dtype=np.int64) for values in list(zip(*parts, strict=True))[:3])
        hidden_states = self._projected(hidden_states)
        for depth, model in enumerate(self._models):
            token_ids = np.concatenate(
                [np.array(part.token_ids[depth : depth + part.num_read], dtype=np.int64) for part in parts]
            )
            batch = self._extend(token_ids, rows, num_new.astype(np.int32), starts.astype(np.int32), model=model)
            batch.logits_indices = torch.zeros(1, dtype=torch.int64, device=self._model.device)  # none is used
            batch.hidden_states = hidden_states
            output = model.forward(batch)
            if depth < self._num_layers - 1:
                hidden_states = _own(output.hidden_states)

    def leave(self, request: DraftedRequest) -> None:
        """Notes what is kept of pages that others may share."""
        if request in self._is_whole:
            return
        computed, num_tokens = self._computed.get(request), num_tokens_of(request)
        whole = (num_tokens - 1) // self._pages.page_size * self._pages.page_size
        known = min(whole, num_tokens - self._num_layers, self._kept.end_of(request))  # a prompt may be in its midst
        if computed is None or computed >= known or request in self._broken or not self._kept.has(request, computed):
            return
        self._left.append(self._part(request, request.row, computed, known))

    def settle(self) -> None:
        parts, self._left = self._left, []
        self._read_kept(parts)

    # Drafts -----------------------------------------------------------------------------------------------------------

    def propose(self, asked: Sequence[Asked]) -> list[Draft]:
        whole = [one for one in asked if one.request in self._is_whole]
        if self._behind is None or not whole:
            return super().propose(asked)
        others = [one for one in asked if one.request not in self._is_whole]
        found = dict(zip([one.request for one in others], super().propose(others), strict=True))
        rows, lengths = [one.request.row for one in whole], [one.num_computed for one in whole]
        with torch.inference_mode(), self._model.on_device():
            made = self._behind.drafts_of(rows, lengths)
        found |= {one.request: draft[: one.most] for one, draft in zip(whole, made, strict=True)}
        return [found[one.request] for one in asked]

    def end(self, request: DraftedRequest) -> None:
        super().end(request)
        self._kept.forget(request)
        self._is_whole.discard(request)

    def _first_rows(self, asked: Sequence[Asked]) -> list[DraftRow]:
        rows, room = [], self._most_tokens
        for one in asked:
            newest = one.num_computed - 1
            part = self._lacking(one.request, one.num_computed, min(self._computed.get(one.request, 0), newest))
            if part is None or one.request in self._broken or part.num_read > room:
                continue
            room -= part.num_read
            most = one.most if self._num_layers == 1 else min(one.most, self._num_layers)
            rows.append(DraftRow(one, part.token_ids, part.start, most))
        return rows

    def _lacking(self, request: DraftedRequest, num_computed: int, start: int) -> Part | None:
        """The positions to read from `start` on, of a request of so many computed tokens; None: hidden states are not
        kept, or the host does not know the tokens."""
        if not self._kept.has(request, start) or num_tokens_of(request) <= num_computed:
            return None
        count = num_computed - start
        return Part(request.row, start, count, tokens_of(request, start + 1, num_computed + 1))

    def _part(self, request: DraftedRequest, row: int, start: int, end: int) -> Part:
        """Positions whose tokens are known in every layer."""
        return Part(row, start, end - start, tokens_of(request, start + 1, end + self._num_layers))

    def _taken(self, row: DraftRow, token_ids: Sequence[int]) -> Draft:
        draft = super()._taken(row, token_ids)
        has_run = len(token_ids) >= self._num_layers
        known = row.asked.num_computed + 1 - self._num_layers
        self._computed[row.asked.request] = max(row.start, known) if has_run else row.start
        return draft

    def _draft(self, rows: Sequence[DraftRow]) -> torch.Tensor:
        return super()._draft(rows) if self._num_layers == 1 else self._draft_by_layers(rows)

    def _draft_by_layers(self, rows: Sequence[DraftRow]) -> torch.Tensor:
        """[R, K] int64: a token of each layer; all read the same positions."""
        device = self._model.device
        most = np.array([row.most for row in rows])
        num_new = np.array([len(row.token_ids) for row in rows], dtype=np.int32)
        given = np.array([row.asked.request.row for row in rows], dtype=np.int64), num_new
        starts, ends = np.array([row.start for row in rows], dtype=np.int32), np.cumsum(num_new, dtype=np.int64)
        token_ids = np.concatenate([np.array(row.token_ids, dtype=np.int64) for row in rows])
        drafts = torch.full((len(rows), int(most.max())), NO_TOKEN, dtype=torch.int64, device=device)
        hidden_states = self._projected(self._kept_of(self._parts_of(rows)))
        for depth, model in enumerate(self._models[: drafts.shape[1]]):
            batch = self._extend(token_ids, *given, starts, model=model)
            batch.hidden_states = hidden_states
            for number in range(depth):  # the last positions read what is guessed
                wanted = np.flatnonzero(num_new > number)
                guessed = drafts[upload(wanted, device), depth - 1 - number].clamp(min=0)
                batch.input_ids.index_copy_(0, upload(ends[wanted] - 1 - number, device), guessed)
            output = model.forward(batch)
            hidden_states = _own(output.hidden_states)
            drafts[:, depth] = self._choose(output.next_token_logits, batch, drafts, depth)
            token_ids = np.roll(token_ids, -1)
        return drafts.masked_fill_(upload(np.arange(drafts.shape[1]) >= most[:, None], device), NO_TOKEN)

    def _first_batch(self, rows: Sequence[DraftRow], row_ids: np.ndarray, ends: np.ndarray) -> ForwardBatch:
        batch = super()._first_batch(rows, row_ids, ends)
        batch.hidden_states = self._projected(self._kept_of(self._parts_of(rows)))
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

    def _parts_of(self, rows: Sequence[DraftRow]) -> list[Part]:
        return [Part(row.asked.request.row, row.start, len(row.token_ids), row.token_ids) for row in rows]

    def _kept_of(self, parts: Sequence[Part]) -> torch.Tensor:
        """[T, n * hidden] of the parts' positions."""
        return self._kept.read([(part.row, part.start, part.start + part.num_read) for part in parts])

    def _projected(self, hidden_states: torch.Tensor) -> torch.Tensor:
        project = self._model.model.projection
        return hidden_states if project is None else project(hidden_states)

    def _indices(self, places: Sequence[int] | np.ndarray) -> torch.Tensor:
        return upload(np.array(places, dtype=np.int64), self._model.device)


def _own(hidden_states: torch.Tensor | None) -> torch.Tensor:
    """A copy: a graph's are written over by its next run."""
    assert hidden_states is not None, "the draft model was compiled to give them"
    return hidden_states.clone()
