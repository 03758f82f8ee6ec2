"""A head's pass behind a captured verify step, in a second graph: the next step's drafts, without the host.

The pass makes keys of the hidden states that the step computed, of tokens that hold, and drafts behind the newest one.
A draft stays on the device until the next step of its request takes it, if the request is as long as it was then.

Shape legend: R requests of the step, C tokens of each, B tokens of a block, K of a draft; T rows of the pass, R * (C +
B); M rows of the slot table, W pages of a row.
"""

from __future__ import annotations

import logging

import torch

from mllm_compile.runtime.attention.capture import needed
from mllm_compile.runtime.cuda_graph.model import CapturableModel
from mllm_compile.runtime.cuda_graph.verify_loop import StepTensors
from mllm_compile.runtime.forward_batch import ForwardBatch, TokenInputs
from mllm_compile.runtime.graph_mode import BatchDescriptor, CUDAGraphMode, GraphKind
from mllm_compile.runtime.ops.tokens.replay_slots import REPLAY_SLOTS
from mllm_compile.runtime.ops.tokens.verify_fields import DRAFT_FIELD, MOST_DRAFTED
from mllm_compile.runtime.sampling.params import NO_TOKEN
from mllm_compile.runtime.speculation.block import DraftBlock

logger = logging.getLogger(__name__)

_LEAST_SAME = 0.5  # of drafts: bfloat16's last bits change some, of a head of random weights


class DraftChain:
    """See the module's header. Its methods but the first are called in a capture."""

    def __init__(self, head: CapturableModel, block: DraftBlock, most_rows: int) -> None:
        """
        Args:
            head: its attention and its own graphs are there.
            most_rows: T of the largest pass.
        """
        device, (num_rows, self._most_tokens) = head.device, head.req_to_token_pool.req_to_token.shape
        self._head, self._block, self._most_rows = head, block, most_rows
        self._attention, self._page_table = (
            needed(head.attn_backend.verifies),
            needed(head.attn_backend.decodes).page_table,
        )

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._ids, self._positions, self._slots, self._rows = (zeros(most_rows) for _ in range(4))
        self._rope_lens = zeros(most_rows)  # each row is a decode
        self._seq_lens = zeros(most_rows, dtype=torch.int32)
        self._hidden = zeros(most_rows, head.model.hidden_size, dtype=head.config.dtype)
        self._drafts = zeros(num_rows, MOST_DRAFTED, dtype=torch.int32)
        self._counts, self._made_at = zeros(num_rows, dtype=torch.int32), zeros(num_rows, dtype=torch.int32)
        # Where the choice leaves tokens that nobody reads.
        self._last_tokens, self._replay_slot = zeros(num_rows), zeros(2)
        self._chosen = zeros(REPLAY_SLOTS, most_rows)

    @property
    def keys_ahead(self) -> int:
        """Most tokens behind those of a step that the pass writes keys of."""
        return 1 + min(MOST_DRAFTED, self._block.most)

    def num_drafted(self, width: int) -> int:
        """K behind a step of so many tokens a request."""
        return min(width - 1, self._block.most)

    def block_size(self, width: int) -> int:
        """B behind a step of so many tokens a request."""
        return 1 + self._block.num_masks(self.num_drafted(width))

    def holds(self, num_requests: int, width: int) -> bool:
        """True if the pass behind such a step fits."""
        return self._num_rows(num_requests, width) <= self._most_rows

    def _num_rows(self, num_requests: int, width: int) -> int:
        return num_requests * (width + self.block_size(width))

    def plan(self, num_requests: int, width: int) -> None:
        """Plans attention of the pass behind such a step, ahead of its capture."""
        total = self._num_rows(num_requests, width)
        self._attention.init_forward_metadata_capture_verify(total, 1, self._seq_lens[:total])  # each row by itself

    def give(self, step: StepTensors) -> None:
        """Writes the drafts of requests whose drafts are the device's into the fields of a step."""
        fields, rows = step.fields, step.fields[:, 0].long()
        lengths = torch.where(fields[:, 1] >= 0, fields[:, 1], step.lengths[rows])
        counts = torch.where(self._made_at[rows] == lengths, self._counts[rows], 0)
        is_own = fields[:, 3] < 0
        fields[:, 3] = torch.where(is_own, counts, fields[:, 3])
        fields[:, DRAFT_FIELD:] = torch.where(is_own[:, None], self._drafts[rows], fields[:, DRAFT_FIELD:])

    def read(self, hidden_states: torch.Tensor, num_requests: int, width: int) -> None:
        """Keeps a step's hidden states [R * C, …] for the pass behind it."""
        states, project = hidden_states[: num_requests * width], self._head.model.projection
        states = states if project is None else project(states)
        places = self._hidden[: self._num_rows(num_requests, width)].view(num_requests, -1, states.shape[1])
        places[:, :width] = states.view(num_requests, width, -1)

    def run(self, step: StepTensors, width: int) -> None:
        """Runs the pass behind a step of C tokens each, once it is known which are accepted."""
        head, rows = self._head, step.fields[:, 0].long()
        num_requests, count = rows.shape[0], self.num_drafted(width)
        total = self._num_rows(num_requests, width)
        lengths = self._write_tokens(step, width)
        given = self._ids[:total], self._positions[:total], self._slots[:total]
        tokens = TokenInputs(*given, rope_lens=self._rope_lens[:total], hidden_states=self._hidden[:total])
        all_rows = torch.arange(total, device=head.device)
        # Of its own also with one request: a package copies an input that does not begin at a multiple of 16 bytes.
        drafted = all_rows.view(num_requests, -1)[:, -count:].flatten().clone()
        descriptor = BatchDescriptor(total, total, GraphKind.VERIFY)
        output = head.program.run(self._batch(total), tokens, drafted, CUDAGraphMode.FULL, descriptor, all_rows)
        positions = (lengths[:, None] + torch.arange(1, 1 + count, device=head.device)).flatten().int()
        of_rows = rows.repeat_interleave(count)  # not a view of one row, of which kernels read what is behind it
        self._keep(rows, lengths, self._choose(output.next_token_logits, of_rows, positions).view(num_requests, count))

    def fault(self, step: StepTensors, width: int) -> str | None:
        """The fault of the pass that ran last, behind such a step: its drafts are not those of the same rows as prompts
        of one token each, which see no other. None: they are. Waits for the device."""
        head, rows = self._head, step.fields[:, 0].long()
        num_requests, count = rows.shape[0], self.num_drafted(width)
        total = self._num_rows(num_requests, width)
        lengths = self._seq_lens[:total].clamp(min=1)
        ones = torch.ones_like(lengths)
        batch = head.prepare_forward_batch_extend(
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
        batch.hidden_states, batch.sees_ahead = self._hidden[:total], True
        of_requests = torch.arange(total, device=head.device).view(num_requests, -1)
        batch.logits_indices = of_requests[:, -count:].flatten()
        try:
            expected = head.run_eager(batch).next_token_logits.argmax(-1).view(num_requests, count)
        except (RuntimeError, ValueError) as error:
            return f"drafts behind {num_requests} requests cannot be compared with the head's ({error})"
        is_tried = (rows > 0) & (self._made_at[rows] + self.block_size(width) <= self._most_tokens)
        same = (expected == self._drafts[rows, :count])[is_tried]
        if not same.numel():
            return None
        share = float(same.float().mean())
        return (
            None
            if share > _LEAST_SAME
            else f"behind {num_requests} requests {1 - share:.0%} of drafts are not the head's"
        )

    def _batch(self, total: int) -> ForwardBatch:
        return self._head.prepare_forward_batch_decode(
            self._ids[:total],
            self._rows[:total],
            self._seq_lens[:total],
            self._slots[:total],
            positions=self._positions[:total],
            seq_lens_cpu=torch.ones(total, dtype=torch.int32),
        )

    def _write_tokens(self, step: StepTensors, width: int) -> torch.Tensor:
        """Makes the inputs of the pass. A row that stands for nothing is padding, which attention passes over.

        Returns:
            [R] int64: tokens of each request behind the step.
        """
        rows, base, num_new = step.fields[:, 0].long(), step.drafted[:, 0].long(), step.results[:, 0]
        size = self.block_size(width)
        shape, device = (rows.shape[0], width + size), self._head.device
        table = self._head.req_to_token_pool.req_to_token
        columns, is_request = torch.arange(width + size, device=device), rows[:, None] > 0
        in_block = columns >= width
        lengths = (base + num_new)[:, None]
        positions = torch.where(in_block, lengths + columns - width, base[:, None] + columns)
        is_row = is_request & torch.where(in_block, positions < table.shape[1], columns < num_new[:, None])
        newest, mask = step.last_tokens[rows][:, None], self._block.mask_token_id
        ids = torch.where(in_block, torch.where(columns == width, newest, mask), NO_TOKEN)
        positions, of_rows = torch.where(is_row, positions, 0), torch.where(is_row, rows[:, None], 0)
        ends = (lengths + size).clamp(max=table.shape[1])
        places = {
            self._ids: torch.where(is_row, ids, 0),
            self._positions: positions,
            self._rows: of_rows,
            self._slots: torch.where(is_row, table[of_rows, positions], 0),
            self._seq_lens: torch.where(is_row & in_block, ends, 0),
        }
        total = rows.shape[0] * shape[1]
        for place, values in places.items():
            place[:total].view(shape).copy_(values)
        if (pages := self._page_table) is not None:
            page_size = self._head.config.runtime.page_size
            ids_of_pages = table[:, ::page_size][of_rows.flatten()] // page_size
            num_pages = min(pages.shape[1], ids_of_pages.shape[1])
            pages[:total, :num_pages] = ids_of_pages[:, :num_pages]
        return base + num_new

    def _choose(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[S] int64: the tokens that the model would choose of these logits."""
        loop = self._head.model.decode_loop
        assert loop is not None, "chain_obstacle has looked"
        floats, ints = self._head.row_state.sampling.tables
        arguments = [logits, floats, ints, rows, positions, self._replay_slot, self._last_tokens, self._chosen]
        return loop.end(arguments)[0]

    def _keep(self, rows: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor) -> None:
        """Keeps drafts [R, K], up to the first that is none, for requests of these lengths."""
        self._drafts[rows, : tokens.shape[1]] = tokens.int()
        places = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
        self._counts[rows] = torch.where(tokens < 0, places, tokens.shape[1]).amin(1)
        self._made_at[rows] = lengths.int()


def chain_obstacle(head: CapturableModel) -> str | None:
    """Why a draft model, whose attention is there, makes its drafts beside verify steps; None: it can behind them."""
    if head.model.block is None or not head.model.block.sees_ahead or not head.config.most_chained:
        return "it does not draft a block of tokens that see each other"
    if head.model.decode_loop is None:
        return "it has no kernels that choose tokens"
    if head.attn_backend.verifies is None or head.attn_backend.decodes is None:
        return "it has no kernels that attend in every layer"
    return None


def chain_of(head: CapturableModel | None) -> DraftChain | None:
    """The chain of a draft model whose attention and graphs are there; None: it drafts on its own."""
    if head is None:
        return None
    obstacle = chain_obstacle(head)
    if obstacle is not None:
        logger.info("a draft model drafts beside verify steps: %s", obstacle)
        return None
    assert head.model.block is not None, "chain_obstacle has looked"
    return DraftChain(head, head.model.block, head.config.most_chained)
