"""Ranks as threads of one process, which wait for each other at every call: for self-checks and tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from mllm_compile.runtime.collectives.base import using
from mllm_compile.runtime.collectives.plain import PlainCommunicator

T = TypeVar("T")

_LONGEST_S = 600.0  # a rank that raised has broken the barrier; this is for one that hangs


class LockstepRank(PlainCommunicator):
    """One rank of `run_lockstep`."""

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank, self.size = rank, len(shared.places)
        self._shared = shared

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._exchange(x, lambda parts: torch.stack(list(parts)).float().sum(0).to(x.dtype))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._exchange(x, lambda parts: torch.stack(list(parts)))

    def broadcast(self, x: torch.Tensor) -> None:
        x.copy_(self._exchange(x, lambda parts: parts[0].clone()))

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
