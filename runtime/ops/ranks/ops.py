"""Ops of a piece that ranks make together: sums, gathers, and the number of the rank.

They go to the communicator of the calling thread (collectives/base.py), on the current stream, and may be captured.
Defined with torch.library's define/impl because calling a `torch.library.custom_op` imports Dynamo and Inductor.
"""

from __future__ import annotations

import torch

from mllm_compile.runtime.collectives.base import current, left_parts

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")
_LIBRARY.define("all_reduce(Tensor x) -> Tensor")
_LIBRARY.define("all_reduce_residual_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)")
_LIBRARY.define("all_gather(Tensor x, int dim, int num_ranks) -> Tensor")
_LIBRARY.define("reduce_scatter(Tensor x, int num_ranks) -> Tensor")
_LIBRARY.define("rank_index(Tensor like) -> Tensor")


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    """The sum over ranks of x, of any shape; the same bits on all ranks."""
    return current().all_reduce(x.contiguous())


def all_reduce_residual_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual + the sum over ranks of x, and weight times the RMS norm of that; the same bits on all ranks.

    Args:
        x, residual: [.., N] of one shape; weight: [N].
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous(), residual.reshape(-1, x.shape[-1]).contiguous()
    summed, normed = current().all_reduce_residual_norm(*rows, weight.contiguous(), eps)
    return summed.view(x.shape), normed.view(x.shape)


def all_gather(x: torch.Tensor, dim: int, num_ranks: int) -> torch.Tensor:
    """The parts of all ranks, in order, one behind another in dimension `dim`.

    Args:
        num_ranks: how many there are: a size that a graph has to know.
    """
    left = left_parts()
    if left is not None:
        left.append(x.contiguous())
        return _all_gather_fake(x, dim, num_ranks)
    parts = current().all_gather(x.contiguous())
    if x.shape[:dim].numel() == 1:  # they are in order
        return parts.movedim(0, dim).flatten(dim, dim + 1)
    return torch.cat(parts.unbind(), dim)  # copies runs; flatten would copy elements, which took 99 µs of 78 MB, not 40


def reduce_scatter(x: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """The rank's part of the sum over ranks of x.

    Args:
        x: [num_ranks * N, ...], parts of all ranks one behind another.

    Returns:
        [N, ...].
    """
    return current().reduce_scatter(x.contiguous())


def rank_index(like: torch.Tensor) -> torch.Tensor:
    """The rank that calls, from 0: [] int64 on the device of `like`."""
    return torch.full((), current().rank, dtype=torch.int64, device=like.device)


def _all_gather_fake(x: torch.Tensor, dim: int, num_ranks: int) -> torch.Tensor:
    return x.new_empty([size * num_ranks if place == dim else size for place, size in enumerate(x.shape)])


_LIBRARY.impl("all_reduce", all_reduce, "CompositeExplicitAutograd")
_LIBRARY.impl("all_reduce_residual_norm", all_reduce_residual_norm, "CompositeExplicitAutograd")
_LIBRARY.impl("all_gather", all_gather, "CompositeExplicitAutograd")
_LIBRARY.impl("reduce_scatter", reduce_scatter, "CompositeExplicitAutograd")
_LIBRARY.impl("rank_index", rank_index, "CompositeExplicitAutograd")
torch.library.register_fake("mllm::all_reduce", lambda x: x.new_empty(x.shape), lib=_LIBRARY)
torch.library.register_fake(
    "mllm::all_reduce_residual_norm",
    lambda x, residual, weight, eps: (x.new_empty(x.shape), x.new_empty(x.shape)),
    lib=_LIBRARY,
)
torch.library.register_fake("mllm::all_gather", _all_gather_fake, lib=_LIBRARY)
torch.library.register_fake(
    "mllm::reduce_scatter", lambda x, num_ranks: x.new_empty((x.shape[0] // num_ranks, *x.shape[1:])), lib=_LIBRARY
)
torch.library.register_fake("mllm::rank_index", lambda like: like.new_empty((), dtype=torch.int64), lib=_LIBRARY)
