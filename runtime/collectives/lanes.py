"""Communicators for parts of a step, each with a stream: their sums may run beside each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import ParamSpec, TypeVar

import torch

from mllm_compile.runtime.collectives.base import Communicator
from mllm_compile.runtime.collectives.copied import CopiedSums
from mllm_compile.runtime.collectives.sum_kernels import AddNormKernel
from mllm_compile.runtime.cuda.kernel import CudaKernel

P = ParamSpec("P")
T = TypeVar("T")


class InOrder:
    """Calls that are queued on several streams, and run one after another in the order in which they were queued.

    Their waits hold multiprocessors, and they share one counter of calls: two at once, in another order on another
    rank, would wait for each other.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ended: torch.cuda.Event | None = None

    def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        stream = torch.cuda.current_stream(self._device)
        if self._ended is not None:
            stream.wait_event(self._ended)
        result = call(*args, **kwargs)
        self._ended = stream.record_event()
        return result


class Lane:
    """The communicator of one part. Large sums that are normed are copied; all other calls go to the whole step's
    communicator, in order."""

    def __init__(
        self, whole: Communicator, in_order: InOrder, copied: CopiedSums | None, kernels: Collection[CudaKernel]
    ) -> None:
        self.rank, self.size = whole.rank, whole.size
        self._whole, self._in_order, self._copied, self._kernels = whole, in_order, copied, kernels

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._in_order(self._whole.all_reduce, x)

    def all_reduce_residual_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        copied = self._copied
        if copied is not None and copied.takes(x) and AddNormKernel(x.shape[1]) in self._kernels:
            return copied.sum_and_norm(x, residual, weight, eps)
        return self._in_order(self._whole.all_reduce_residual_norm, x, residual, weight, eps)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._in_order(self._whole.all_gather, x)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return self._in_order(self._whole.reduce_scatter, x)

    def choose(self, rank_logits: torch.Tensor) -> torch.Tensor:
        return self._in_order(self._whole.choose, rank_logits)

    def choice(self, columns: int) -> None:
        """None: parts of a step are not captured."""

    def broadcast(self, x: torch.Tensor) -> None:
        self._in_order(self._whole.broadcast, x)

    def least(self, value: int) -> int:
        return self._whole.least(value)

    def use_kernels(self, kernels: Collection[CudaKernel], in_one_order: bool = False) -> None:
        """The whole step's communicator has them."""

    def lanes(self, count: int, most_bytes: int) -> Sequence[Communicator]:
        return self._whole.lanes(count, most_bytes)

    def abort(self) -> None:
        self._whole.abort()

    def close(self) -> None:
        """Memory is the whole step's communicator's."""
