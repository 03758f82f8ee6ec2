"""Layers with a state in captured steps with prompts: one capture serves whatever decodes and prompts make up so many
tokens, or whatever prompts alone.

Their kernels read rows, lengths and flags on the device. So each is launched for as many requests as such a step can
have. For a request that is not a decode the decodes' kernel finds no row, and the prompts' kernel overwrites its
output. For a decode the prompts' kernel finds no tokens.

Shape legend: R requests that a captured step may have.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from mllm_compile.runtime.attention.metadata import (
    CommonAttentionMetadata,
    StepPrompts,
    split_decodes_and_prefills,
)

# Prompts of a captured step of prompts alone: kernels have blocks for as many, though most steps have one.
MOST_PROMPTS = 4
# Rows, sources, starts, ends and flags of PromptStates.
_PROMPTS = struct.Struct("".join(f"{MOST_PROMPTS}{kind}" for kind in "qqii?"))


class PromptRows(NamedTuple):
    """The tensors that kernels read of a step's prompts, [R] each.

    Attributes:
        rows: int64, where their states are left; 0 is padding's.
        has_state: bool, they go on from a state.
        sources: int64, the rows of these: their own, or a cached prefix's.
        starts, ends: int32, each request's tokens.
    """

    rows: torch.Tensor
    has_state: torch.Tensor
    sources: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor


@dataclass(frozen=True)
class MixedStates:
    """The tensors that kernels of a captured step read, and that a replay finds filled.

    Attributes:
        of_decodes: (rows, has_state) of the decodes, [R]; row 0 for another request. None: the step has none.
        of_prompts: what they read of prompts.
    """

    of_decodes: tuple[torch.Tensor, torch.Tensor] | None
    of_prompts: PromptRows


class MixedStateSteps:
    """The captured steps of a backend; all of them read the same tensors.

    Args:
        max_requests: of any step.
    """

    def __init__(self, max_requests: int, device: torch.device) -> None:
        self._max_requests = max_requests
        self._rows = torch.zeros(max_requests, dtype=torch.int64, device=device)
        self._decode_rows = torch.zeros_like(self._rows)
        self._has_state = torch.zeros(max_requests, dtype=torch.bool, device=device)
        self._starts = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self._ends = torch.zeros_like(self._starts)

    def capture(self, num_tokens: int) -> MixedStates:
        """Gives what a step of `num_tokens` reads: nothing but padding, until `fill`."""
        self._clear()
        return self._step(num_tokens)

    def _step(self, num_tokens: int) -> MixedStates:
        count = min(num_tokens, self._max_requests)
        rows, decode_rows, has_state, starts, ends = (held[:count] for held in self._held)
        return MixedStates((decode_rows, has_state), PromptRows(rows, has_state, rows, starts, ends))

    @property
    def _held(self) -> tuple[torch.Tensor, ...]:
        return self._rows, self._decode_rows, self._has_state, self._starts, self._ends

    def _clear(self) -> None:
        for held in self._held:
            held.zero_()

    def fill(self, num_tokens: int, common: CommonAttentionMetadata) -> MixedStates:
        """Makes the next replay of a step of `num_tokens` one of this batch, without waiting: of decodes alone too,
        where no graph of decodes holds so many. Returns what it reads."""
        batch, (num_decodes, *_) = common.batch, split_decodes_and_prefills(common)
        count, new, earlier = common.num_reqs, batch.extend_seq_lens, batch.extend_prefix_lens
        self._clear()
        rows, ends, has_state = self._rows[:count], self._ends[:count], self._has_state[:count]
        rows.copy_(batch.req_pool_indices[:count])
        self._decode_rows[:num_decodes].copy_(rows[:num_decodes])
        if new is None or earlier is None:  # decodes alone: one token each, behind others
            has_state.fill_(True)
            torch.cumsum(has_state, 0, dtype=torch.int32, out=ends)
        else:
            torch.gt(earlier[:count], 0, out=has_state)
            torch.cumsum(new[:count], 0, dtype=torch.int32, out=ends)
            torch.sub(ends[num_decodes:], new[num_decodes:count], out=self._starts[num_decodes:count])
        self._starts[:num_decodes].copy_(ends[:num_decodes])
        return self._step(num_tokens)


class PromptStates:
    """Writes the prompts' tensors to the host's memory of a step's inputs; they are uploaded with it.

    Attributes:
        num_bytes: of all of it, a multiple of 256.
    """

    num_bytes = -(-_PROMPTS.size // 256) * 256

    @classmethod
    def capture(cls, work: torch.Tensor) -> MixedStates:
        """Gives what a step reads.

        Args:
            work: [≥ num_bytes] uint8 on the device, aligned to 256 bytes.
        """
        rows, sources, starts, ends, has_state = cls._split(work)
        bounds = starts.view(torch.int32), ends.view(torch.int32)
        given = rows.view(torch.int64), has_state.view(torch.bool), sources.view(torch.int64)
        return MixedStates(None, PromptRows(*given, *bounds))

    @classmethod
    def write(cls, memory: np.ndarray, prompts: StepPrompts) -> bool:
        """Writes what a replay reads; False: there are more prompts than places.

        Args:
            memory: [≥ num_bytes] uint8.
        """
        count = prompts.rows.size
        if count > MOST_PROMPTS:
            return False
        starts, padding = prompts.starts.tolist(), [0] * (MOST_PROMPTS - count)
        rows, sources = prompts.rows.tolist(), prompts.state_rows.tolist()
        has_state = (prompts.prefix_lens > 0).tolist()
        # At once, and not array by array: the GPU waits.
        parts = rows, padding, sources, padding, starts[:-1], padding, starts[1:], padding, has_state, padding
        _PROMPTS.pack_into(memory.data, 0, *itertools.chain.from_iterable(parts))
        return True

    @staticmethod
    def _split(work: Any) -> list[Any]:
        """Bytes of rows, sources, starts, ends and flags, each from a multiple of 16 on: a package copies other
        inputs."""
        places = [MOST_PROMPTS * width for width in (0, 8, 16, 20, 24, 25)]
        return [work[first:end] for first, end in itertools.pairwise(places)]
