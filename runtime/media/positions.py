"""Positions on three axes, time, row and column, of a prompt with images; text has the same number on all three."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mllm_compile.runtime.media.grids import Grid


def positions_of(num_tokens: int, images: Iterable[tuple[int, Grid]], merge: int) -> tuple[np.ndarray, int]:
    """The prompt's positions, and what those of later tokens are beyond their index.

    Args:
        images: in order, where each begins among the tokens, and its grid of patches.
        merge: rows and columns of patches that make one token.

    Returns:
        [3, num_tokens] int64; and the difference, mostly negative.
    """
    positions = np.empty((3, num_tokens), dtype=np.int64)
    at = position = 0
    for start, (frames, rows, columns) in images:
        positions[:, at:start] = position + np.arange(start - at)
        position += start - at
        size = (frames, rows // merge, columns // merge)
        places = np.stack(np.meshgrid(*map(np.arange, size), indexing="ij")).reshape(3, -1)
        at = start + places.shape[1]
        positions[:, start:at] = position + places
        position += max(size[1:])
    positions[:, at:] = position + np.arange(num_tokens - at)
    return positions, position - at
