"""A head's passes behind a captured verify step, in a second graph: the next step's drafts, without the host.

The first pass makes keys of the hidden states that the step computed, of tokens that hold. It drafts behind the newest
one: all tokens, if the head has masks for them, or one. Then passes of a token each follow, which read hidden states of
the pass before. A draft stays on the device until the next step of its request takes it, if the request is as long as
it was then.

Shape legend: R requests of the step, C tokens of each, B masks and newest tokens behind them, K tokens of a draft, F of
them by the first pass; T rows of it, R * (C + B); M rows of the slot table.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from mllm_compile.runtime.cuda_graph.draft_pass import DraftPass
from mllm_compile.runtime.cuda_graph.model import CapturableModel
from mllm_compile.runtime.cuda_graph.verify_loop import StepTensors
from mllm_compile.runtime.ops.tokens.replay_slots import REPLAY_SLOTS
from mllm_compile.runtime.ops.tokens.verify_fields import DRAFT_FIELD, MOST_DRAFTED
from mllm_compile.runtime.sampling.params import NO_TOKEN

logger = logging.getLogger(__name__)

_LEAST_SAME = 0.5  # of drafts: bfloat16's last bits change some, of a head of random weights


class DraftChain:
    """See the module's header. Its methods but the first are called in a capture."""

    def __init__(self, head: CapturableModel, most_rows: int) -> None:
        """
        Args:
            head: its attention and its own graphs are there.
            most_rows: T of the largest pass.
        """
        device, (num_rows, self._most_tokens) = head.device, head.req_to_token_pool.req_to_token.shape
        self._head, self._block, self._most_rows = head, head.model.block, most_rows
        self._sees_ahead = self._block is not None and self._block.sees_ahead
        self._first = DraftPass(head, most_rows)
        self._further = DraftPass(head, most_rows) if self._block is None else None

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._drafts = zeros(num_rows, MOST_DRAFTED, dtype=torch.int32)
        self._counts, self._made_at = zeros(num_rows, dtype=torch.int32), zeros(num_rows, dtype=torch.int32)
        # Where the choice leaves tokens that nobody reads.
        self._last_tokens, self._replay_slot = zeros(num_rows), zeros(2)
        self._chosen = zeros(REPLAY_SLOTS, most_rows)

    @property
    def keys_ahead(self) -> int:
        """Most tokens behind those of a step that the passes write keys of."""
        return 1 + self.num_drafted(1 + MOST_DRAFTED)

    def num_drafted(self, width: int) -> int:
        """K behind a step of so many tokens a request."""
        return width - 1 if self._block is None else min(width - 1, self._block.most)

    def block_size(self, width: int) -> int:
        """B behind a step of so many tokens a request."""
        if self._block is None:
            return 0
        return self._sees_ahead + self._block.num_masks(self.num_drafted(width))

    def holds(self, num_requests: int, width: int) -> bool:
        """True if the passes behind such a step fit."""
        return self._num_rows(num_requests, width) <= self._most_rows

    def _num_rows(self, num_requests: int, width: int) -> int:
        return num_requests * (width + self.block_size(width))

    def give(self, step: StepTensors) -> None:
        """Writes the drafts of requests whose drafts are the device's into the fields of a step."""
        fields, rows = step.fields, step.fields[:, 0].long()
        lengths = torch.where(fields[:, 1] >= 0, fields[:, 1], step.lengths[rows])
        counts = torch.where(self._made_at[rows] == lengths, self._counts[rows], 0)
        is_own = fields[:, 3] < 0
        fields[:, 3] = torch.where(is_own, counts, fields[:, 3])
        fields[:, DRAFT_FIELD:] = torch.where(is_own[:, None], self._drafts[rows], fields[:, DRAFT_FIELD:])

    def read(self, hidden_states: torch.Tensor, num_requests: int, width: int) -> None:
        """Keeps a step's hidden states [R * C, …] for the passes behind it."""
        states, project = hidden_states[: num_requests * width], self._head.model.projection
        mask = None if project is None else project.mask
        if project is not None:
            states = project(states if mask is None else torch.cat([states, mask[None].to(states.dtype)]))
        places = self._first.hidden_states[: self._num_rows(num_requests, width)].view(
            num_requests, -1, states.shape[1]
        )
        places[:, :width] = states[: num_requests * width].view(num_requests, width, -1)
        if mask is not None:
            places[:, width:] = states[-1]

    def run(self, step: StepTensors, width: int) -> None:
        """Runs the passes behind a step of C tokens each, once it is known which are accepted."""
        rows, lengths = step.fields[:, 0].long(), step.drafted[:, 0].long() + step.results[:, 0]
        num_requests, count = rows.shape[0], self.num_drafted(width)
        self._place(step, rows, lengths, width)
        wanted = self._wanted(step, width)
        output = self._first.run(self._num_rows(num_requests, width), wanted)
        drafts = self._choose(output.next_token_logits, rows, lengths + 1)
        if self._further is not None and output.hidden_states is not None:
            drafts = self._draft_on(self._further, drafts, output.hidden_states[wanted], rows, lengths, count)
        self._keep(rows, lengths, drafts)

    def _draft_on(
        self,
        further: DraftPass,
        drafts: torch.Tensor,
        hidden_states: torch.Tensor | None,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        count: int,
    ) -> torch.Tensor:
        """[R, K] int64: drafts behind the first tokens [R, 1], by hidden states [R, hidden] of the pass before each."""
        num_requests = rows.shape[0]
        all_rows = torch.arange(num_requests, device=rows.device)
        for number in range(1, count):
            assert hidden_states is not None, "a head that drafts token by token gives them"
            positions = lengths + number - 1
            is_row = (rows > 0) & (positions < self._most_tokens)
            further.place(drafts[:, -1].clamp(min=0), positions, rows, (positions + 1).int(), is_row)
            further.hidden_states[:num_requests] = hidden_states
            output = further.run(num_requests, all_rows)
            chosen = self._choose(output.next_token_logits, rows, lengths + 1 + number)
            drafts, hidden_states = torch.cat([drafts, chosen], 1), output.hidden_states
        return drafts

    def fault(self, step: StepTensors, width: int) -> str | None:
        """The fault of the passes that ran last, behind such a step, or None. Waits for the device.

        The same rows run as prompts of one token each, which see no other. Drafts of the first and of the last pass
        are compared with theirs.
        """
        rows = step.fields[:, 0].long()
        num_requests, count = rows.shape[0], self.num_drafted(width)
        is_tried = (rows > 0) & (self._made_at[rows] + max(count, self.block_size(width)) <= self._most_tokens)
        wanted, total = self._wanted(step, width), self._num_rows(num_requests, width)
        first = wanted.shape[0] // num_requests
        passes = [(self._first, total, wanted, slice(0, first))]
        if self._further is not None and count > 1:
            all_rows = torch.arange(num_requests, device=rows.device)
            passes.append((self._further, num_requests, all_rows, slice(count - 1, count)))
        for one, size, of_rows, columns in passes:
            try:
                expected = one.run_as_prompts(size, of_rows).argmax(-1).view(num_requests, -1)
            except (RuntimeError, ValueError) as error:
                return f"drafts behind {num_requests} requests cannot be compared with the head's ({error})"
            same = (expected == self._drafts[rows, columns])[is_tried]
            if same.numel() and (share := float(same.float().mean())) <= _LEAST_SAME:
                return f"behind {num_requests} requests {1 - share:.0%} of drafts are not the head's"
        return None

    def drafts_of(self, rows: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """The drafts of requests of such lengths, for the host; nothing where none was made at that length. Waits for
        the device."""
        of_rows = torch.tensor(rows, device=self._drafts.device)
        counts, made_at = self._counts[of_rows], self._made_at[of_rows]
        found = torch.cat([self._drafts[of_rows], counts[:, None], made_at[:, None]], 1).tolist()
        return [
            draft[:count] if made == length else []
            for (*draft, count, made), length in zip(found, lengths, strict=True)
        ]

    def _place(self, step: StepTensors, rows: torch.Tensor, lengths: torch.Tensor, width: int) -> None:
        """Makes the inputs of the first pass."""
        block, base, num_new = self._block, step.drafted[:, 0].long()[:, None], step.results[:, :1]
        rows, lengths = rows[:, None], lengths[:, None]
        columns = torch.arange(width + self.block_size(width), device=rows.device)
        in_block = columns >= width
        positions = torch.where(in_block, lengths + columns - width, base + columns)
        is_row = (rows > 0) & torch.where(in_block, positions < self._most_tokens, columns < num_new)
        of_masks = torch.full_like(positions, NO_TOKEN if block is None else block.mask_token_id)
        if self._sees_ahead:
            newest = step.last_tokens[rows]
            ids = torch.where(in_block, torch.where(columns == width, newest, of_masks), NO_TOKEN)
            ends = (lengths + self.block_size(width)).clamp(max=self._most_tokens)
            seq_lens = torch.where(in_block, ends, 0)
        else:  # each token of the step is read beside the hidden state before it
            ids = of_masks
            ids[:, :width] = step.results[:, 2 : 2 + width].clamp(min=0)
            seq_lens = positions + 1
        self._first.place(ids, positions, rows.expand_as(positions), seq_lens.int(), is_row)

    def _wanted(self, step: StepTensors, width: int) -> torch.Tensor:
        """[R * F] int64: the rows of the first pass that say the draft."""
        num_requests, count = step.fields.shape[0], self.num_drafted(width)
        size = width + self.block_size(width)
        of_rows = torch.arange(num_requests * size, device=step.fields.device).view(num_requests, size)
        if self._sees_ahead:
            wanted = of_rows[:, -count:]
        elif self._block is not None and not self._block.from_newest:
            wanted = of_rows[:, width:]
        else:
            newest = of_rows.gather(1, (step.results[:, :1] - 1).clamp(min=0))
            wanted = torch.cat([newest, of_rows[:, width:]], 1)
        return wanted.flatten().clone()  # with one request it would be a view

    def _choose(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[R, n] int64: the tokens that the model would choose of these logits [R * n, V].

        Args:
            positions: [R] int64: of each request's first token.
        """
        loop, count = self._head.model.decode_loop, logits.shape[0] // rows.shape[0]
        assert loop is not None, "chain_obstacle has looked"
        floats, ints = self._head.row_state.sampling.tables
        places = (positions[:, None] + torch.arange(count, device=rows.device)).flatten().int()
        of_rows = rows.repeat_interleave(count)  # not a view of one row, of which kernels read what is behind it
        arguments = [logits, floats, ints, of_rows, places, self._replay_slot, self._last_tokens, self._chosen]
        return loop.end(arguments)[0].view(-1, count)

    def _keep(self, rows: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor) -> None:
        """Keeps drafts [R, K], up to the first that is none, for requests of these lengths."""
        self._drafts[rows, : tokens.shape[1]] = tokens.int()
        places = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
        self._counts[rows] = torch.where(tokens < 0, places, tokens.shape[1]).amin(1)
        self._made_at[rows] = lengths.int()


def chain_obstacle(head: CapturableModel) -> str | None:
    """Why a draft model, whose attention is there, makes its drafts beside verify steps; None: it can behind them."""
    if not head.config.most_chained:
        return "it reads no hidden states, or others draft on from it"
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
    return DraftChain(head, head.config.most_chained)
