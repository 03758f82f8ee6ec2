"""The verify loop: a captured verify step that drafts, makes its own inputs, and accepts.

One launch is a whole step. Its first kernel looks drafts up in the text of each request, or takes the host's, and makes
the inputs of the model. Its last ones choose a token behind each token of the step. They accept each draft as far as
the choices agree with it, and append that to the text. So the next step needs nothing of this one that the device does
not have: it can be launched while this one runs.

The device owns a request's length and text while such steps follow each other. The host gives both where they begin.
Ranks that have a model together do the same work each, on rank 0's choice of tokens. Where ranks have requests of their
own, each has the requests of all, a block a rank, its own first. So rank 0's choice is turned until they are.

Shape legend: R requests of a captured step, of all ranks; C tokens of each, M rows of the slot table, L tokens of a
row's text, V vocab.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from mllm_compile.runtime.config_sections import SpeculativeSection
from mllm_compile.runtime.cuda.driver import copy_pinned
from mllm_compile.runtime.cuda_graph.step_inputs import StepInputs
from mllm_compile.runtime.device.staging import StagingBuffer, StagingRing
from mllm_compile.runtime.ops.tokens.replay_slots import REPLAY_SLOTS
from mllm_compile.runtime.ops.tokens.verify_fields import DRAFTED_FIELDS, RESULT_FIELDS, VERIFY_FIELDS
from mllm_compile.runtime.program.loaded import DecodeLoopPieces, VerifyPieces
from mllm_compile.runtime.sampling.params import NO_TOKEN
from mllm_compile.runtime.sampling.state import RowState


class StepTensors(NamedTuple):
    """The tensors of a step of R requests on the device.

    Attributes:
        fields: [R, VERIFY_FIELDS] int32, as the host gave them.
        drafted: [R, DRAFTED_FIELDS] int32, what its first kernel leaves.
        results: [R, RESULT_FIELDS] int64, what its last one does.
        lengths: [M] int32, of requests behind it.
        last_tokens: [M] int64, the newest ones.
    """

    fields: torch.Tensor
    drafted: torch.Tensor
    results: torch.Tensor
    lengths: torch.Tensor
    last_tokens: torch.Tensor


class VerifyLoop:
    """The verify loop of one thread; see the module's header."""

    def __init__(
        self,
        pieces: VerifyPieces,
        choice: DecodeLoopPieces,
        section: SpeculativeSection,
        inputs: StepInputs,
        row_state: RowState,
        req_to_token: torch.Tensor,
        page_table: torch.Tensor,
        broadcast: Callable[[torch.Tensor], None],
        most_requests: int,
        most_tokens: int,
        first_block: tuple[int, int] = (0, 1),
    ) -> None:
        """
        Args:
            choice: its `end` chooses tokens, as in captured decodes.
            inputs: the places that the model reads.
            row_state: the choice's parameters, to be flushed before a replay, and the place of newest tokens.
            req_to_token: [M, columns] int32: the slot of each position.
            page_table: [≥ tokens, W] int32: what the program's decode attention reads.
            broadcast: ModelRunner's.
            most_requests: R of the largest step.
            most_tokens: R * C of the largest.
            first_block: the rank whose requests come first, and of how many with requests of their own.
        """
        device = page_table.device
        num_rows, num_history = req_to_token.shape
        self._pieces, self._choice = pieces, choice
        self._inputs, self._row_state = inputs, row_state
        self._req_to_token, self._page_table, self._broadcast = req_to_token, page_table, broadcast
        self._first_block = first_block

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._fields, self._drafted = zeros(most_requests, VERIFY_FIELDS), zeros(most_requests, DRAFTED_FIELDS)
        self._results = zeros(most_requests, RESULT_FIELDS, dtype=torch.int64)
        self._lengths, self._history = zeros(num_rows), zeros(num_rows, num_history)
        length = section.synthetic_acceptance_length
        part, whole = (0.0, -1.0) if length is None else math.modf(length - 1)
        looked_up = section.prompt_lookup_min, section.prompt_lookup_max
        self._settings = torch.tensor([*looked_up, length is not None], dtype=torch.int32, device=device)
        self._synthetic = torch.tensor([whole, part], dtype=torch.float32, device=device)
        # Where the choice leaves tokens for the host in captured decodes; here nobody reads them.
        self._replay_slot = zeros(2, dtype=torch.int64)
        self._chosen = zeros(REPLAY_SLOTS, most_tokens, dtype=torch.int64)
        self._uploads, self._texts, self._downloads = (StagingRing(device) for _ in range(3))

    # In a capture -----------------------------------------------------------------------------------------------------

    def begin(self, num_requests: int, num_tokens: int) -> None:
        """Puts the first kernel of a step of R requests with C tokens each on the stream."""
        shape, inputs = (num_requests, num_tokens), self._inputs
        size = num_requests * num_tokens
        places = inputs.input_ids, inputs.positions, inputs.out_cache_loc, inputs.req_pool_indices, inputs.seq_lens
        self._pieces.begin(
            [
                self._fields[:num_requests],
                self._settings,
                self._row_state.last_tokens,
                self._lengths,
                self._history,
                self._req_to_token,
                *(place[:size].view(shape) for place in places),
                self._page_table[:size].view(*shape, -1),
                self._drafted[:num_requests],
            ]
        )

    def end(self, logits: torch.Tensor, num_requests: int) -> torch.Tensor:
        """Runs the last kernels, of logits [R * C, V]. Returns the tokens [R * C] int64."""
        size, state = logits.shape[0], self._row_state
        rows, seq_lens = self._inputs.req_pool_indices[:size], self._inputs.seq_lens[:size]
        arguments = [logits, *state.sampling.tables, rows, seq_lens, self._replay_slot, state.last_tokens, self._chosen]
        tokens = self._choice.end(arguments)[0]
        self._broadcast(tokens)  # draws are rank 0's alone
        self._accept(self._own_first(tokens).view(num_requests, -1))
        return tokens

    def _own_first(self, of_rank_0: torch.Tensor) -> torch.Tensor:
        """Rank 0's values [R or R * C, …] in this rank's order."""
        rank, num_ranks = self._first_block
        return of_rank_0.roll(-rank * (of_rank_0.shape[0] // num_ranks), 0) if rank else of_rank_0

    def _accept(self, tokens: torch.Tensor) -> None:
        num_requests, state = tokens.shape[0], self._row_state
        self._pieces.end(
            [
                tokens,
                self._fields[:num_requests],
                self._drafted[:num_requests],
                self._synthetic,
                state.sampling.tables[1],
                state.last_tokens,
                self._lengths,
                self._history,
                self._results[:num_requests],
            ]
        )

    def tensors(self, num_requests: int) -> StepTensors:
        """The tensors of a step of so many requests."""
        return StepTensors(
            self._fields[:num_requests],
            self._drafted[:num_requests],
            self._results[:num_requests],
            self._lengths,
            self._row_state.last_tokens,
        )

    # Before and after a replay ----------------------------------------------------------------------------------------

    def write_texts(self, rows: np.ndarray, places: np.ndarray, tokens: np.ndarray) -> None:
        """Brings tokens of texts to the device.

        Args:
            rows, places, tokens: [N] of any integers: of each token its row, its place in the text, and it.
        """
        buffer = self._texts.next(16 * tokens.size)
        host = buffer.memory[: 16 * tokens.size].view(torch.int64).view(2, -1)
        np.add(rows.astype(np.int64) * self._history.shape[1], places, out=host.numpy()[0])
        host.numpy()[1] = tokens
        index, values = host.to(self._history.device, non_blocking=True)
        buffer.record()
        self._history.view(-1).index_copy_(0, index, values.int())

    def share_texts(self, rows: torch.Tensor, most: int) -> None:
        """Brings the first `most` tokens of the texts of rows [N] int64 from rank 0 to the others."""
        texts = self._history[rows, :most].contiguous()
        self._broadcast(texts)
        self._history[rows, :most] = texts

    def write_fields(self, fields: np.ndarray, size: int) -> None:
        """Brings the fields [n, VERIFY_FIELDS] int32 of requests to a step of `size`, with padding behind them."""
        row_bytes = 4 * VERIFY_FIELDS
        buffer = self._uploads.next(size * row_bytes)
        host = buffer.array[: size * row_bytes].view(np.int32).reshape(size, VERIFY_FIELDS)
        host[: len(fields)], host[len(fields) :] = fields, 0
        if self._fields.is_cuda:
            copy_pinned(buffer.memory, self._fields, size * row_bytes)
        else:
            self._fields[:size].copy_(torch.from_numpy(host))
        buffer.record()

    def draft_ids(self, num_requests: int, num_drafted: int) -> torch.Tensor:
        """The drafts of the last replay, [R, num_drafted] int64; NO_TOKEN behind them."""
        of_requests = self._drafted[:num_requests]
        columns = torch.arange(num_drafted, device=of_requests.device)
        return torch.where(columns < of_requests[:, 1:2], of_requests[:, 2 : 2 + num_drafted].long(), NO_TOKEN)

    def accept(self, tokens: torch.Tensor, draft_ids: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Accepts anew what the last replay drafted, by tokens [R, C] int64 in place of its own choice. Other ranks get
        both arguments from rank 0.

        Args:
            draft_ids: [R, C - 1] int64, shorter drafts with the same beginnings; None: all of them.

        Returns:
            [R, C] int64 and [R] int64: AcceptedTokens.token_ids and counts, until another replay.
        """
        num_requests, width = tokens.shape
        if draft_ids is not None:
            self._drafted[:num_requests, 1] = (draft_ids != NO_TOKEN).sum(dim=1)
        drafted = self._drafted[:num_requests]
        self._broadcast(drafted)
        self._broadcast(tokens)
        drafted.copy_(self._own_first(drafted))
        self._accept(self._own_first(tokens))
        return self._results[:num_requests, 2 : 2 + width], self.counts(num_requests)

    def counts(self, num_requests: int) -> torch.Tensor:
        """[R] int64: the tokens of each request that hold, of its first in the last replay on."""
        return self._results[:num_requests, 0].clone()

    def results(self, num_requests: int) -> tuple[StagingBuffer, np.ndarray]:
        """The results [n, RESULT_FIELDS] int64 of the last replay, on their way to the host; there once the buffer's
        event is over. The caller records it."""
        of_step = self._results[:num_requests]
        buffer = self._downloads.next(of_step.nbytes)
        copy = buffer.memory[: of_step.nbytes].view(torch.int64).view(of_step.shape)
        return buffer, copy.copy_(of_step, non_blocking=True).numpy()
