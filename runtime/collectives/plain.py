"""The base of communicators without kernels: they sum and gather, and the rest is made of that in plain torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

import torch

from mllm_compile.runtime.collectives.base import Communicator, add_and_norm, choose_by_gather, part_of_sum
from mllm_compile.runtime.cuda.kernel import CudaKernel


class PlainCommunicator(Communicator, ABC):
    """A communicator whose calls are over when they return."""

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> torch.Tensor: ...

    def all_reduce_residual_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_and_norm(self.all_reduce(x), residual, weight, eps)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return part_of_sum(self.all_reduce(x), self.rank, self.size)

    def choose(self, rank_logits: torch.Tensor) -> torch.Tensor:
        return choose_by_gather(self, rank_logits)

    def choice(self, columns: int) -> None:
        """No kernel: gathers."""

    def least(self, value: int) -> int:
        return int(self.all_gather(torch.tensor([value])).amin())

    def use_kernels(self, kernels: Collection[CudaKernel], in_one_order: bool = False) -> None:
        """None are for it."""

    def lanes(self, count: int, most_bytes: int) -> Sequence[Communicator]:
        return [self] * count
