"""Facts that follow from a grid of patches: where each is, which windows they form, what of a table is near.

A grid is t × h × w patches; merge × merge neighbours make one feature, and are packed one after another.
"""

from __future__ import annotations

import numpy as np

from mllm_compile.runtime.media.tower import Grid


def patch_places(grid: Grid, merge: int) -> np.ndarray:
    """Row and column of each patch, [patches, 2] int64; patches of one feature follow each other."""
    frames, rows, columns = grid
    places = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), -1)
    blocks = places.reshape(rows // merge, merge, columns // merge, merge, 2).swapaxes(1, 2)
    return np.tile(blocks.reshape(-1, 2), (frames, 1))


def windows(grid: Grid, merge: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """The features in the order of windows, [features] int64, and each window's patches, [windows] int64."""
    frames, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    index = np.arange(frames * rows * columns).reshape(frames, rows, columns)
    parts = [
        index[frame, top : top + window, left : left + window].ravel()
        for frame in range(frames)
        for top in range(0, rows, window)
        for left in range(0, columns, window)
    ]
    return np.concatenate(parts), np.array([part.size for part in parts], dtype=np.int64) * merge**2


def table_taps(
    grid: Grid, merge: int, side: int, align_corners: bool, bicubic: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The entries of a table of side × side that each patch is between, [patches, taps] int64, and their weights,
    float32: 4 of bilinear, 16 of bicubic interpolation."""
    places = patch_places(grid, merge)
    axes = [axis_taps(places[:, axis], grid[1 + axis], side, align_corners, bicubic) for axis in (0, 1)]
    (row_taps, row_weights), (column_taps, column_weights) = axes
    indices = row_taps[:, :, None] * side + column_taps[:, None, :]
    weights = row_weights[:, :, None] * column_weights[:, None, :]
    return indices.reshape(len(places), -1), weights.reshape(len(places), -1)


def axis_taps(
    index: np.ndarray, size: int, side: int, align_corners: bool = False, bicubic: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The entries of `side` that places `index` [N] of `size` are between, [N, taps] int64, and their weights, float32;
    2 taps, or 4 of bicubic interpolation."""
    at = index.astype(np.float32)
    if align_corners:
        source = at * np.float32(side - 1) / np.float32(max(size - 1, 1))
    else:
        source = (at + np.float32(0.5)) * np.float32(side) / np.float32(size) - np.float32(0.5)
    first = np.floor(source)
    offsets = np.arange(-1, 3) if bicubic else np.arange(2)
    distance = np.abs(source[:, None] - first[:, None] - offsets.astype(np.float32))
    weights = _cubic(distance) if bicubic else np.clip(1 - distance, 0, None)
    taps = np.clip(first.astype(np.int64)[:, None] + offsets, 0, side - 1)
    return taps, weights.astype(np.float32)


def _cubic(distance: np.ndarray) -> np.ndarray:
    """The weights of entries by their distance, as torch has them: Keys' kernel with a = -0.75."""
    a = np.float32(-0.75)
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, np.float32(0)))
