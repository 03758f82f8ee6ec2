"""A stage of a pipeline among the others: it takes values from the one before, and hands others on.

A stage runs ahead of the tokens that rank 0 samples. It waits for a request's token only where a step needs it. So
steps of other requests are under way meanwhile.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from mllm_compile.runtime.collectives.stages import MOST_SENT, StagedCommunicator
from mllm_compile.runtime.program.spec import HandedValue
from mllm_compile.runtime.program.stages import StageProgram


class Pipeline:
    """A rank's place in a pipeline. Used by the thread that launches steps.

    Attributes:
        is_last: this stage has the head.
    """

    def __init__(
        self, communicator: StagedCommunicator, stage: StageProgram, most_tokens: int, device: torch.device
    ) -> None:
        """
        Args:
            most_tokens: of a step.
        """
        self._stage, self._most_tokens = stage, most_tokens
        self._before, self._behind = communicator.before, communicator.behind
        self.is_last = communicator.stage == communicator.num_stages - 1
        self._samples = communicator.rank_of_all == 0
        width = communicator.size
        self._token_links = [
            link
            for rank, link in communicator.tokens.items()
            if communicator.num_stages - 1 - rank // width in stage.token_stages
        ]
        # Values of the most tokens, flat: captured pieces read them at these addresses.
        self._places = {value.name: _flat(value, most_tokens, device) for value in stage.takes}
        # Rows of each step whose tokens rank 0 sends, and which have not been received.
        self._awaited: deque[np.ndarray] = deque()
        self._most_awaited = min(2 * communicator.num_stages, MOST_SENT)

    def take(self, num_tokens: int) -> dict[str, torch.Tensor]:
        """The values of the stage before for a step of so many tokens, until the next one."""
        taken = {value.name: self._place(value, num_tokens) for value in self._stage.takes}
        for x in taken.values():
            assert self._before is not None, "a stage that takes values has one before it"
            self._before.receive(x)
        return taken

    def _place(self, value: HandedValue, num_tokens: int) -> torch.Tensor:
        if num_tokens > self._most_tokens:
            raise ValueError(f"a step of {num_tokens} tokens; expected at most {self._most_tokens}")
        shape = [num_tokens if size < 0 else size for size in value.shape]
        return self._places[value.name][: math.prod(shape)].view(shape)

    def give(self, values: Sequence[torch.Tensor]) -> None:
        """Hands values on, which may be written over afterwards."""
        for x in values:
            assert self._behind is not None, "a stage that hands values on has one behind it"
            self._behind.send(x.clone(memory_format=torch.contiguous_format))

    def sampled(self, rows: np.ndarray, last_tokens: torch.Tensor) -> None:
        """Sends rank 0's newest tokens to the stages that read them; there notes that those of `rows` will come."""
        if self._samples:
            for link in self._token_links:
                link.send(last_tokens.clone())
        elif self._token_links:
            self._awaited.append(rows.copy())
            while len(self._awaited) > self._most_awaited:
                self._receive(last_tokens)

    def await_tokens(self, rows: np.ndarray, last_tokens: torch.Tensor) -> None:
        """Brings `last_tokens` [rows] int64 up to all tokens of these rows."""
        steps = [index for index, sampled in enumerate(self._awaited) if np.isin(rows, sampled).any()]
        for _ in range(steps[-1] + 1 if steps else 0):
            self._receive(last_tokens)

    def _receive(self, last_tokens: torch.Tensor) -> None:
        self._awaited.popleft()
        (link,) = self._token_links
        link.receive(last_tokens)


def _flat(value: HandedValue, num_tokens: int, device: torch.device) -> torch.Tensor:
    count = math.prod(num_tokens if size < 0 else size for size in value.shape)
    return torch.empty(count, dtype=getattr(torch, value.dtype), device=device)
