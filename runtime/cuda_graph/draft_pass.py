"""A pass of a draft model in a graph: its rows are requests of one token to attention, behind the write of all keys.

Shape legend: T rows of a pass, S of them with logits, M rows of the slot table, W pages of a row.
"""

from __future__ import annotations

import torch

from mllm_compile.runtime.attention.capture import needed
from mllm_compile.runtime.cuda_graph.model import CapturableModel
from mllm_compile.runtime.forward_batch import LogitsProcessorOutput, TokenInputs
from mllm_compile.runtime.graph_mode import BatchDescriptor, CUDAGraphMode, GraphKind


class DraftPass:
    """The inputs of passes of up to so many rows, which stay in place.

    Attributes:
        hidden_states: [≥ T, hidden]: what each row reads beside its token.
    """

    def __init__(self, head: CapturableModel, most_rows: int) -> None:
        device = head.device
        self._head = head
        self._attention = needed(head.attn_backend.verifies)
        self._page_table = needed(head.attn_backend.decodes).page_table
        self._ids, self._positions, self._slots, self._rows, self._rope_lens = (
            torch.zeros(most_rows, dtype=torch.int64, device=device) for _ in range(5)
        )
        self._seq_lens = torch.zeros(most_rows, dtype=torch.int32, device=device)
        self.hidden_states = torch.zeros(most_rows, head.model.hidden_size, dtype=head.config.dtype, device=device)

    def place(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        is_row: torch.Tensor,
    ) -> None:
        """Writes the rows of a pass, all of one shape of T in all; one that is none is padding, which attention passes
        over.

        Args:
            ids, positions: of each row's token, int64.
            rows: of the table of slots, int64.
            seq_lens: keys that each row sees; 0: it only leaves its key.
            is_row: bool.
        """
        total, table = is_row.numel(), self._head.req_to_token_pool.req_to_token
        positions, rows = torch.where(is_row, positions, 0), torch.where(is_row, rows, 0)
        places = {
            self._ids: torch.where(is_row, ids, 0),
            self._positions: positions,
            self._rows: rows,
            self._slots: torch.where(is_row, table[rows, positions], 0),
            self._seq_lens: torch.where(is_row, seq_lens, 0),
        }
        for place, values in places.items():
            place[:total].view(is_row.shape).copy_(values)
        if (pages := self._page_table) is not None:
            page_size = self._head.config.runtime.page_size
            of_rows = table[:, ::page_size][rows.flatten()] // page_size
            num_pages = min(pages.shape[1], of_rows.shape[1])
            pages[:total, :num_pages] = of_rows[:, :num_pages]

    def run(self, total: int, wanted: torch.Tensor) -> LogitsProcessorOutput:
        """Runs the first T rows, as they were placed. Gives logits of the rows `wanted` [S] int64, which begins at a
        multiple of 16 bytes: a package copies another input."""
        head = self._head
        self._attention.init_forward_metadata_capture_verify(total, 1, self._seq_lens[:total])
        batch = head.prepare_forward_batch_decode(
            self._ids[:total],
            self._rows[:total],
            self._seq_lens[:total],
            self._slots[:total],
            positions=self._positions[:total],
            seq_lens_cpu=torch.ones(total, dtype=torch.int32),
        )
        tokens = TokenInputs(
            self._ids[:total],
            self._positions[:total],
            self._slots[:total],
            rope_lens=self._rope_lens[:total],
            hidden_states=self.hidden_states[:total],
        )
        descriptor = BatchDescriptor(total, total, GraphKind.VERIFY)
        all_rows = torch.arange(total, device=head.device)
        return head.program.run(batch, tokens, wanted, CUDAGraphMode.FULL, descriptor, all_rows)

    def run_as_prompts(self, total: int, wanted: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] of the rows `wanted` of the pass that ran last, as prompts of one token each."""
        lengths = self._seq_lens[:total].clamp(min=1)
        ones = torch.ones_like(lengths)
        batch = self._head.prepare_forward_batch_extend(
            self._ids[:total],
            self._rows[:total],
            lengths,
            ones,
            lengths - 1,
            self._slots[:total],
            positions=self._positions[:total],
            extend_seq_lens_cpu=ones.cpu(),
            extend_prefix_lens_cpu=(lengths - 1).cpu(),
        )
        batch.hidden_states, batch.sees_ahead = self.hidden_states[:total], True
        batch.logits_indices = wanted
        return self._head.run_eager(batch).next_token_logits
