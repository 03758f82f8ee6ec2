"""Positions on three axes, time, row and column, of a prompt with images or videos; text has one number on all axes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.media.tower import Grid


@dataclass(frozen=True, slots=True)
class Placed:
    """A grid of patches among a prompt's tokens: the first one's index, and how far frames are apart in time."""

    start: int
    grid: Grid
    interval: float = 1.0


def positions_of(num_tokens: int, grids: Iterable[Placed], merge: int) -> tuple[np.ndarray, int]:
    """The prompt's positions, and the offset of later tokens' positions from their index.

    Args:
        grids: in order.
        merge: rows and columns of patches that make one token.

    Returns:
        [3, num_tokens] int64; and the difference, mostly negative.
    """
    positions = np.empty((3, num_tokens), dtype=np.int64)
    at = position = 0
    for placed in grids:
        start, (frames, rows, columns) = placed.start, placed.grid
        positions[:, at:start] = position + np.arange(start - at)
        position += start - at
        times = (np.arange(frames) * placed.interval).astype(np.int64)
        axes = (times, np.arange(rows // merge), np.arange(columns // merge))
        places = np.stack(np.meshgrid(*axes, indexing="ij")).reshape(3, -1)
        at = start + places.shape[1]
        positions[:, start:at] = position + places
        position += max(rows, columns) // merge
    positions[:, at:] = position + np.arange(num_tokens - at)
    return positions, int(positions.max()) + 1 - num_tokens
