"""Layers with a state in captured steps with prompts: one capture serves whatever decodes and prompts make up so many
tokens.

Their kernels read rows, lengths and flags on the device. So each is launched for as many requests as such a step can
have: the decodes' kernel finds no row where a request is no decode, and what it writes there the prompts' kernel writes
again; the prompts' kernel finds no tokens where one is.

Shape legend: R requests that a captured step may have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mllm_compile.runtime.attention.metadata import CommonAttentionMetadata, split_decodes_and_prefills


@dataclass(frozen=True)
class MixedStates:
    """The tensors that kernels of a captured step read, and that a replay finds filled.

    Attributes:
        of_decodes: (rows, has_state) of the decodes, [R]; row 0 where a request is none.
        of_prompts: (rows, has_state, starts, ends), [R]: request i's tokens are from starts[i] to ends[i].
    """

    of_decodes: tuple[torch.Tensor, torch.Tensor]
    of_prompts: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


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
        return MixedStates((decode_rows, has_state), (rows, has_state, starts, ends))

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
