"""The most probable token of each row, of logits whose columns are cut over ranks (choose.cu)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mllm_compile.runtime.collectives.push import Peers, kernel_on
from mllm_compile.runtime.collectives.sum_kernels import CHUNK_BYTES, MOST_CHOICES, ChooseKernel
from mllm_compile.runtime.cuda.driver import Argument, address_of

_BUFFERS = 3
_KEY_BYTES = 8
_STATE_WORDS = 2 + _BUFFERS


@dataclass(frozen=True, slots=True)
class HandOn:
    """Where tokens go in a captured decode, as ops/tokens/decode_loop.py's end_decode has these tensors."""

    rows: torch.Tensor
    last_tokens: torch.Tensor
    replay_slot: torch.Tensor
    chosen: torch.Tensor


def choice_bytes(num_ranks: int) -> int:
    """Bytes of the memory that one rank receives in; all its words are 0 at first."""
    return _BUFFERS * num_ranks * MOST_CHOICES * _KEY_BYTES


class TokenChoice:
    """One rank's choices. All ranks choose for as many rows, in the same order."""

    def __init__(self, rank: int, places: Sequence[int], device: torch.device) -> None:
        """
        Args:
            places: the addresses on this device of each rank's memory (choice_bytes), which their owners keep.
        """
        self._device = device
        self._rank, self._num_ranks = ctypes.c_int(rank), ctypes.c_int(len(places))
        self._peers = Peers()
        self._peers.at[: len(places)] = list(places)
        self._keys = torch.zeros(MOST_CHOICES, dtype=torch.int64, device=device)
        self._state = torch.zeros(_STATE_WORDS, dtype=torch.int32, device=device)
        self._are_gone = torch.zeros(1, dtype=torch.int32, pin_memory=True)  # the device reads it over the bus

    def takes(self, rank_logits: torch.Tensor) -> bool:
        """True if this chooses from the logits [S, V of a rank], where the runtime brought the kernel of V."""
        is_ours = (
            rank_logits.dtype is torch.bfloat16
            and rank_logits.is_contiguous()
            and rank_logits.data_ptr() % CHUNK_BYTES == 0
        )
        return is_ours and 0 < rank_logits.shape[0] <= MOST_CHOICES

    def choose(self, rank_logits: torch.Tensor, hand_on: HandOn | None = None) -> torch.Tensor:
        """The tokens [S] int64 of logits that `takes` allows, as Communicator.choose gives them.

        Args:
            hand_on: where they go besides; it moves on to the next replay slot.
        """
        rows, columns = rank_logits.shape
        kernel = ChooseKernel(columns)
        tokens = torch.empty(rows, dtype=torch.int64, device=rank_logits.device)
        places: tuple[torch.Tensor | None, ...] = (None,) * 4
        num_replay_slots, num_slot_rows = 0, 0
        if hand_on is not None:
            places = hand_on.rows, hand_on.last_tokens, hand_on.replay_slot, hand_on.chosen
            num_replay_slots, num_slot_rows = hand_on.chosen.shape
        arguments: tuple[Argument, ...] = (
            *(address_of(tensor) for tensor in (rank_logits, tokens, *places)),
            ctypes.c_int(num_replay_slots),
            ctypes.c_int(num_slot_rows),
            self._peers,
            *(address_of(tensor) for tensor in (self._keys, self._state, self._are_gone)),
            self._rank,
            self._num_ranks,
            ctypes.c_int(rows),
        )
        kernel_on(kernel, self._device).launch(kernel.num_blocks(rows), kernel.num_threads, arguments)
        return tokens

    def give_up(self) -> None:
        """Ends waits for ranks that are gone; from any thread."""
        self._are_gone.fill_(1)
