"""The decode loop: a captured decode that takes its inputs from the host's memory and leaves its tokens there.

One launch is a whole step. Its first kernel reads from pinned memory which requests decode, and takes their newest
tokens from where the step before left them. Its last kernels choose the tokens, keep them for the next step and write
them to pinned memory. So the device does nothing between two steps but the launch, and the host packs a few numbers.

The memory has REPLAY_SLOTS slots. Captured decodes use them one after another, whichever decode runs: the device counts
the replays of graphs with these kernels, and the host does as well.

Shape legend: S rows of a captured decode, M most rows of any, n of them of requests, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from mllm_compile.runtime.collectives.choose import HandOn, TokenChoice
from mllm_compile.runtime.cuda_graph.capture import WeakTensor
from mllm_compile.runtime.cuda_graph.step_inputs import StepInputs
from mllm_compile.runtime.ops.tokens.replay_slots import REPLAY_SLOTS, REQUEST_FIELDS
from mllm_compile.runtime.program.loaded import DecodeLoopPieces
from mllm_compile.runtime.sampling.state import RowState

_IN_PLACE = -1  # in place of a row: a step's inputs are in their places already


class HostSlot:
    """The host's memory of one replay; valid until REPLAY_SLOTS others have begun.

    Attributes:
        tokens: [M] int64 on the host: what the replay chose, once `wait` returns.
    """

    def __init__(self, requests: np.ndarray, tokens: np.ndarray) -> None:
        self._requests = requests  # [M, REQUEST_FIELDS] int32
        self.tokens = tokens
        self._event = torch.cuda.Event()

    def write(
        self,
        rows: np.ndarray,
        seq_lens: np.ndarray,
        slots: np.ndarray,
        size: int,
        padding_len: int,
        deltas: np.ndarray | None = None,
    ) -> None:
        """Writes the requests of a step of `size` rows, and padding behind them.

        Args:
            rows, seq_lens, slots, deltas: [n] of any integers, n ≤ size: as DecodeGraphs.launch takes them.
            padding_len: tokens that a row of padding has.
        """
        count, fields = rows.size, self._requests
        fields[:count, 0], fields[:count, 1], fields[:count, 2] = rows, seq_lens, slots
        fields[:count, 3] = 0 if deltas is None else deltas
        fields[count:size] = (0, padding_len, 0, 0)

    def write_in_place(self, size: int) -> None:
        """Notes that the inputs of `size` rows are in their places."""
        self._requests[:size, 0] = _IN_PLACE

    def record(self) -> None:
        """Notes that all uses of this slot are queued now."""
        self._event.record()

    def wait(self) -> None:
        """Block until what was queued at the last `record` is over."""
        self._event.synchronize()  # at once when never recorded


class DecodeLoop:
    """The decode loop of one thread; see the module's header."""

    def __init__(
        self,
        pieces: DecodeLoopPieces,
        inputs: StepInputs,
        row_state: RowState,
        req_to_token: torch.Tensor,
        page_table: torch.Tensor,
        broadcast_tokens: Callable[[], None],
        choice: TokenChoice | None,
    ) -> None:
        """
        Args:
            inputs: the places that captured decodes read.
            row_state: the choice's parameters, to be flushed before a replay, and the place of tokens.
            req_to_token: [rows, columns] int32: the slot of each position.
            page_table: [≥ M, W] int32: what the program's decode attention reads.
            broadcast_tokens, choice: ModelRunner's.
        """
        self._pieces = pieces
        self._inputs = inputs
        self._row_state = row_state
        self._req_to_token = req_to_token
        self._page_table = page_table
        self._broadcast_tokens, self._choice = broadcast_tokens, choice
        most = inputs.max_requests
        # Both are the device's too: it reads and writes them over the bus.
        self._requests = torch.zeros(REPLAY_SLOTS, most, REQUEST_FIELDS, dtype=torch.int32, pin_memory=True)
        self._chosen = torch.zeros(REPLAY_SLOTS, most, dtype=torch.int64, pin_memory=True)
        self._requests_of_device = WeakTensor(self._requests).tensor()
        self._chosen_of_device = WeakTensor(self._chosen).tensor()
        # The number of the slot, which the last kernel of a replay advances; and a copy for that kernel, whose programs
        # must not read what one of them advances (ops/tokens/decode_loop.py).
        self._slot_of_device = torch.zeros(2, dtype=torch.int64, device=page_table.device)
        self._slots = [HostSlot(*slot) for slot in zip(self._requests.numpy(), self._chosen.numpy(), strict=True)]
        self._next = 0
        for slot in self._slots:
            slot.write_in_place(most)  # for runs ahead of a capture

    # In a capture -----------------------------------------------------------------------------------------------------

    def begin(self, size: int) -> None:
        """Puts the first kernel of a decode of `size` rows on the stream."""
        inputs = self._inputs
        self._pieces.begin(
            [
                self._slot_of_device,
                self._requests_of_device,
                self._row_state.last_tokens,
                self._req_to_token,
                inputs.input_ids[:size],
                inputs.positions[:size],
                inputs.out_cache_loc[:size],
                inputs.req_pool_indices[:size],
                inputs.seq_lens[:size],
                self._page_table[:size],
            ]
        )

    def end(self, logits: torch.Tensor) -> torch.Tensor:
        """Runs the last kernels, of logits [S, V]. Returns the tokens [S] int64."""
        size, inputs = logits.shape[0], self._inputs
        rows, seq_lens = inputs.req_pool_indices[:size], inputs.seq_lens[:size]
        arguments = [logits, *self._row_state.sampling.tables, rows, seq_lens]
        arguments += [self._slot_of_device, self._row_state.last_tokens, self._chosen_of_device]
        tokens = self._pieces.end(arguments)[0]
        self._broadcast_tokens()  # draws are rank 0's alone
        return tokens

    def end_greedy_across_ranks(self, rank_logits: torch.Tensor) -> torch.Tensor:
        """Runs the last kernel, by which ranks choose together, on the rank's part of the logits [S, V of a rank].
        Returns the tokens [S] int64.

        Raises:
            RuntimeError: the runtime has no such kernel.
        """
        if self._choice is None or not self._choice.takes(rank_logits):
            raise RuntimeError(
                f"there is no kernel by which ranks choose from {tuple(rank_logits.shape)} of {rank_logits.dtype}"
            )
        rows, last_tokens = self._inputs.req_pool_indices[: rank_logits.shape[0]], self._row_state.last_tokens
        return self._choice.choose(rank_logits, HandOn(rows, last_tokens, self._slot_of_device, self._chosen_of_device))

    def captured(self) -> None:
        """Ends the captures: the first replay uses the first slot, whatever ran ahead of captures."""
        self._slot_of_device.zero_()

    # Before and after a replay ----------------------------------------------------------------------------------------

    def next_slot(self) -> HostSlot:
        """The slot of the next replay."""
        slot = self._slots[self._next]
        slot.wait()
        return slot

    def replayed(self) -> None:
        """Notes that the replay of that slot is queued."""
        self._slots[self._next].record()
        self._next = (self._next + 1) % REPLAY_SLOTS
