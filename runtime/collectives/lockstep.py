"""Ranks as threads of one process, which wait for each other at every call: for self-checks and tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from mllm_compile.runtime.collectives.base import Communicator, add_and_norm, choose_by_gather, own_part, using
from mllm_compile.runtime.cuda.kernel import CudaKernel

T = TypeVar("T")

_LONGEST_S = 600.0  # a rank that raised has broken the barrier; this is for one that hangs


class LockstepRank:
    """One rank of `run_lockstep`."""

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank, self.size = rank, len(shared.places)
        self._shared = shared

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._exchange(x, lambda parts: torch.stack(list(parts)).float().sum(0).to(x.dtype))

    def all_reduce_residual_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_and_norm(self.all_reduce(x), residual, weight, eps)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._exchange(x, lambda parts: torch.stack(list(parts)))

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return own_part(self.all_reduce(x), self.rank, self.size)

    def choose(self, own: torch.Tensor) -> torch.Tensor:
        return choose_by_gather(self, own)

    def choice(self, columns: int) -> None:
        """None is for threads."""

    def broadcast(self, x: torch.Tensor) -> None:
        x.copy_(self._exchange(x, lambda parts: parts[0].clone()))

    def least(self, value: int) -> int:
        return int(self._exchange(torch.tensor(value), lambda parts: torch.stack(list(parts)).amin()))

    def use_kernels(self, kernels: Collection[CudaKernel]) -> None:
        """None are for threads."""

    def lanes(self, count: int, most_bytes: int) -> list[Communicator]:
        return [self] * count  # calls are over when they return

    def abort(self) -> None:
        self._shared.barrier.abort()

    def close(self) -> None:
        """Nothing is held."""

    def _exchange(self, x: torch.Tensor, join: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> torch.Tensor:
        shared = self._shared
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        shared.places[self.rank] = x
        shared.barrier.wait(_LONGEST_S)
        joined = join(shared.places)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        shared.barrier.wait(_LONGEST_S)  # nobody may change what another still reads
        return joined


class _Shared:
    def __init__(self, num_ranks: int) -> None:
        self.places: list[torch.Tensor] = [torch.empty(0)] * num_ranks
        self.barrier = threading.Barrier(num_ranks)


def run_lockstep(num_ranks: int, run: Callable[[int], T]) -> list[T]:
    """Calls `run(rank)` for all ranks at once, each in a thread; what they return, by rank.

    Raises:
        Exception: what a rank raised that did so first.
    """
    shared = _Shared(num_ranks)

    def of_rank(rank: int) -> T:
        communicator = LockstepRank(rank, shared)
        try:
            with using(communicator):
                return run(rank)
        except BaseException:
            communicator.abort()
            raise

    with ThreadPoolExecutor(num_ranks, "rank") as threads:
        running = [threads.submit(of_rank, rank) for rank in range(num_ranks)]
    errors = [error for future in running if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in running]
