"""The contract of a communicator, and which one the calling thread's ops use.

Every rank makes the same calls in the same order. Code that runs a model over ranks does it inside `using`.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from mllm_compile.runtime.collectives.choose import TokenChoice
    from mllm_compile.runtime.cuda.kernel import CudaKernel


class Communicator(Protocol):
    """The calls of one rank. On a GPU they are queued on the current stream, and may be captured.

    Attributes:
        rank, size: which of how many this is.
    """

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of x, contiguous, of any shape: a new tensor, with the same bits on all ranks."""

    def all_reduce_residual_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual and the sum over ranks of x, and the RMS norm of that: new tensors, the same bits on all ranks.

        Args:
            x, residual: [T, N], contiguous; weight: [N]; all of one dtype.
        """

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape]: x of every rank, which is contiguous and of one shape on all."""

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """The rank's part of the sum over ranks of x, [size * N, ...] and contiguous: [N, ...], a new tensor."""

    def choose(self, rank_logits: torch.Tensor) -> torch.Tensor:
        """The most probable token of each row, of logits whose columns are cut over ranks; of equals the lowest.

        Args:
            rank_logits: [S, V / size], the rank's columns.

        Returns:
            [S] int64, the same on all ranks, or -1: a row holds NaN or inf, or nothing but -inf.
        """

    def choice(self, columns: int) -> TokenChoice | None:
        """The kernel that chooses so in captured decodes and hands tokens on, or None.

        Args:
            columns: of each rank's logits, in bfloat16.
        """

    def broadcast(self, x: torch.Tensor) -> None:
        """Broadcasts contiguous `x` from rank 0, in place."""

    def least(self, value: int) -> int:
        """The least of a number of each rank; waits for it."""

    def use_kernels(self, kernels: Collection[CudaKernel], in_one_order: bool = False) -> None:
        """Sums by kernels that a runtime has brought, where it has some; all ranks call it, once, when it is loaded.

        Args:
            kernels: the runtime's, the same on all ranks. A process may have other runtimes' kernels too: a rank that
                took one of them would wait for ranks without it.
            in_one_order: a number's sum does not depend on how many others there are, nor on its place among them.
        """

    def lanes(self, count: int, most_bytes: int) -> Sequence[Communicator]:
        """Communicators for parts of a step on streams of their own. All ranks ask for them at the same time, and queue
        the calls of all parts in one order.

        Args:
            most_bytes: of a sum that may be under way beside another part's.
        """

    def abort(self) -> None:
        """Ends calls that are under way, as far as there is a way, and does not wait; none may follow. From any
        thread."""

    def close(self) -> None:
        """Gives up what it holds, once or often; nothing runs any more that was captured with its calls."""


def add_and_norm(
    total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what Communicator.all_reduce_residual_norm does, of a sum that is there, in plain torch."""
    summed = residual + total
    wide = summed.float()
    return summed, weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(total.dtype)


def sum_by_gather(communicator: Communicator, x: torch.Tensor) -> torch.Tensor:
    """Return what Communicator.all_reduce does, in the order of ranks, whatever the place of a number in x."""
    first, *others = communicator.all_gather(x).unbind()
    total = first.to(torch.promote_types(x.dtype, torch.float32), copy=True)
    for other in others:
        total += other
    return total.to(x.dtype)


def part_of_sum(total: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return what Communicator.reduce_scatter does, of a sum that is there."""
    length = total.shape[0] // size
    return total[rank * length : (rank + 1) * length].clone()


def choose_by_gather(communicator: Communicator, rank_logits: torch.Tensor) -> torch.Tensor:
    """Return what Communicator.choose does, in plain torch: ranks exchange two numbers a row."""
    logits = rank_logits.float()
    logits = torch.where(logits.isnan(), torch.inf, logits)
    columns = logits.argmax(-1, keepdim=True)
    tokens = columns + communicator.rank * rank_logits.shape[1]
    pairs = torch.cat([logits.gather(1, columns).double(), tokens.double()], 1)
    largest, tokens = communicator.all_gather(pairs).unbind(-1)  # [size, S] each
    first = largest.argmax(0, keepdim=True)
    chosen = tokens.gather(0, first).squeeze(0).long()
    return torch.where(largest.gather(0, first).squeeze(0).isinf(), -1, chosen)


_threads = threading.local()


def current() -> Communicator:
    """The communicator of the calling thread.

    Raises:
        RuntimeError: it is not inside `using`.
    """
    communicator: Communicator | None = getattr(_threads, "communicator", None)
    if communicator is None:
        raise RuntimeError("an op of several ranks was called outside of `with using(communicator)`")
    return communicator


@contextmanager
def using(communicator: Communicator | None) -> Iterator[None]:
    """Makes it the calling thread's; None: the thread's ops are of one rank."""
    before = getattr(_threads, "communicator", None)
    _threads.communicator = communicator
    try:
        yield
    finally:
        _threads.communicator = before


@contextmanager
def leaving_parts() -> Iterator[list[torch.Tensor]]:
    """Inside, tensors that the calling thread's graphs would gather stay a part on each rank: the list gets this rank's
    parts, and the buffers of the whole hold nothing."""
    before = left_parts()
    parts: list[torch.Tensor] = []
    _threads.parts = parts
    try:
        yield parts
    finally:
        _threads.parts = before


def left_parts() -> list[torch.Tensor] | None:
    """The list of `leaving_parts`; None: the calling thread is not inside it."""
    parts: list[torch.Tensor] | None = getattr(_threads, "parts", None)
    return parts
