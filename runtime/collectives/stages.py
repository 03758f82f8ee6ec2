"""A communicator of a pipeline: ranks of a stage sum among themselves, stages hand values on, rank 0 tokens back.

Rank 0 is in the last stage, which samples; the ranks behind those of a stage are in the stage before it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from mllm_compile.runtime.collectives.base import Communicator

if TYPE_CHECKING:
    from mllm_compile.runtime.collectives.choose import TokenChoice
    from mllm_compile.runtime.cuda.kernel import CudaKernel

MOST_SENT = 16  # values on their way before a sender waits: as many as there may be stages, which each have a step


class Link(Protocol):
    """One way between two ranks. Values arrive in the order in which they were sent."""

    def send(self, x: torch.Tensor) -> None:
        """Sends a contiguous tensor, which nobody writes from now on. Waits for neither end, unless MOST_SENT are on
        their way."""

    def receive(self, x: torch.Tensor) -> None:
        """Receives into a contiguous tensor of the same shape, in the order of the device's stream."""


class DivisibleCommunicator(Communicator, Protocol):
    """A communicator that parts of a group can be made of."""

    def part(self, name: str, ranks: Sequence[int]) -> DivisibleCommunicator | None:
        """The communicator of these ranks, in this order; all ranks of the whole call it. None: this is not one."""

    def link(self) -> Link:
        """The way from the first rank of a group of two to the second. Both call it; each may wait for the other."""


class StagedCommunicator:
    """One rank of a pipeline.

    Attributes:
        rank, size: within its stage.
        rank_of_all: among all ranks.
        stage, num_stages: which of how many this is.
        before, behind: the ways from the stage before and to the next, where there are some.
        tokens: rank → the way from rank 0 to it; of other ranks their own alone.
    """

    def __init__(self, whole: DivisibleCommunicator, num_stages: int) -> None:
        """Waits for all ranks."""
        self._whole = whole
        self.rank_of_all = whole.rank
        width = whole.size // num_stages
        place, self.rank = divmod(whole.rank, width)
        self.size, self.num_stages, self.stage = width, num_stages, num_stages - 1 - place
        self._groups: list[Communicator] = []
        self.before: Link | None = None
        self.behind: Link | None = None
        self.tokens: dict[int, Link] = {}
        try:
            self._part = self._parts(width, num_stages)
            for receiver in range(whole.size - width):
                sender = receiver + width
                if (link := self._link(f"values {sender}", [sender, receiver])) is not None:
                    self.before, self.behind = (self.before, link) if whole.rank == sender else (link, self.behind)
            for rank in range(1, whole.size):
                if (link := self._link(f"tokens {rank}", [0, rank])) is not None:
                    self.tokens[rank] = link
        except BaseException:
            self.close()
            raise

    def _parts(self, width: int, num_stages: int) -> Communicator:
        own: Communicator | None = None
        for first in range(0, width * num_stages, width):
            own = self._made(f"stage {first}", range(first, first + width)) or own
        if own is None:
            raise RuntimeError(f"rank {self.rank_of_all} is in no stage")
        return own

    def _made(self, name: str, ranks: Sequence[int]) -> DivisibleCommunicator | None:
        made = self._whole.part(name, ranks)
        if made is not None:
            self._groups.append(made)
        return made

    def _link(self, name: str, ranks: Sequence[int]) -> Link | None:
        pair = self._made(name, ranks)
        return None if pair is None else pair.link()

    # Within the stage -------------------------------------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._part.all_reduce(x)

    def all_reduce_residual_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._part.all_reduce_residual_norm(x, residual, weight, eps)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._part.all_gather(x)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return self._part.reduce_scatter(x)

    def choose(self, rank_logits: torch.Tensor) -> torch.Tensor:
        return self._part.choose(rank_logits)

    def choice(self, columns: int) -> TokenChoice | None:
        """None: a stage's decode is no whole one, which alone is captured with the choice of tokens."""

    def use_kernels(self, kernels: Collection[CudaKernel], in_one_order: bool = False) -> None:
        self._part.use_kernels(kernels, in_one_order)

    def lanes(self, count: int, most_bytes: int) -> Sequence[Communicator]:
        return self._part.lanes(count, most_bytes)

    # Among all --------------------------------------------------------------------------------------------------------

    def broadcast(self, x: torch.Tensor) -> None:
        self._whole.broadcast(x)

    def least(self, value: int) -> int:
        return self._whole.least(value)

    def abort(self) -> None:
        for group in (*self._groups, self._whole):
            group.abort()

    def close(self) -> None:
        self.abort()  # all of them: closing one waits for the device, and so for what the others do there
        for group in (*self._groups, self._whole):
            group.close()
