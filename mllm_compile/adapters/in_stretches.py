"""Work on factors by the calling thread alone.

Of more numbers than these torch wakes a thread on every core, and waits for all of them, for each of some 500 factors:
where other processes keep the cores busy that takes many times as long as the work.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_STRETCH = 1 << 15  # numbers: at::internal::GRAIN_SIZE


def times(matrix: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """A matrix times a number in a type: computed in float32 and rounded once, in its own type too."""
    out = torch.empty(matrix.shape, dtype=dtype)
    for source, place in _stretches(matrix, out):
        if source.dtype == dtype:
            torch.mul(source, scale, out=place)
        else:
            place.copy_(source.float() * scale)
    return out


def copy_in_stretches(matrix: torch.Tensor, place: torch.Tensor) -> None:
    """Copies a matrix to a contiguous place of its shape and type."""
    for source, its_place in _stretches(matrix, place):
        its_place.copy_(source)


def _stretches(matrix: torch.Tensor, place: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    flat = matrix.reshape(-1)
    return zip(flat.split(_STRETCH), place.view(-1).split(_STRETCH), strict=True)
