"""Towers that take patches with grids: what such a tower is told of an image besides its patches.

An image is a grid of t × h × w patches, of which merge × merge neighbours make one feature, and are packed one after
another. Each function is of one image; images follow each other along the first dimension, whose entries are features.
Free of torch, as the host makes this when a request comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

MAX_FEATURES = 16384  # of an image
# Of the images that one run of a tower encodes: enough to fill a GPU, few enough that the host prepares the next run
# meanwhile. An image with more is a run of its own.
FEATURES_OF_A_RUN = 1024
_KEPT_GRIDS = 16  # up to 4 MB each
Grid = tuple[int, int, int]  # frames, rows and columns of patches


@dataclass(frozen=True)
class GridTower:
    """A tower of this protocol, as the runtime knows it.

    Attributes:
        merge: rows and columns of patches that make one feature.
        patch_width: numbers of a patch.
        feature_width: numbers of a feature, those for deeper layers of the text included.
        window: rows and columns of features that attend to each other in layers with windows; 0: there are none.
        table_side: rows and columns of the learned table of places that is spread over an image; 0: there is none.
        align_corners: the table's corners lie on the image's, else its edges on the image's edges.
        image_token_id, video_token_id: the tokens that stand for a feature; -1: the model takes no videos.
        ticks_per_second: of a video, positions on the axis of time; 0: its frames are one apart.
    """

    merge: int
    patch_width: int
    feature_width: int
    window: int
    table_side: int
    align_corners: bool
    image_token_id: int
    video_token_id: int = -1
    ticks_per_second: int = 0

    def num_features(self, grid: Grid) -> int:
        return grid[0] * grid[1] * grid[2] // self.merge**2

    def input_names(self) -> tuple[str, ...]:
        """The inputs of the tower's program, in the order of `segments` and `inputs`."""
        names = ["pixel_values", "position_ids", "cu_seqlens"]
        names += ["interp_indices", "interp_weights"] if self.table_side else []
        return (*names, *(["window_index", "cu_window_seqlens"] if self.window else []))

    def inputs(self, grid: Grid) -> Mapping[str, np.ndarray]:
        """The tower's inputs for an image beside its pixels, [F features, …] each. Not to be written to: those of the
        last grids are kept."""
        return _inputs_of(self, grid)

    def _inputs(self, grid: Grid) -> dict[str, np.ndarray]:
        features, unit = self.num_features(grid), self.merge**2
        found = {"position_ids": patch_places(grid, self.merge).reshape(features, unit, 2)}
        if self.table_side:
            indices, weights = table_taps(grid, self.merge, self.table_side, self.align_corners)
            found["interp_indices"] = indices.reshape(features, unit, 4)
            found["interp_weights"] = weights.reshape(features, unit, 4)
        if self.window:
            found["window_index"] = windows(grid, self.merge, self.window)[0]
        return found

    def segments(self, grid: Grid) -> dict[str, np.ndarray]:
        """Lengths, in patches, of what attends to each other, by the input that bounds it."""
        found = {"cu_seqlens": np.full(grid[0], grid[1] * grid[2], dtype=np.int64)}
        if self.window:
            found["cu_window_seqlens"] = windows(grid, self.merge, self.window)[1]
        return found


@lru_cache(maxsize=_KEPT_GRIDS)
def _inputs_of(tower: GridTower, grid: Grid) -> Mapping[str, np.ndarray]:
    return tower._inputs(grid)


def patch_places(grid: Grid, merge: int) -> np.ndarray:
    """Row and column of each patch, [patches, 2] int64, those of one feature after another."""
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


def table_taps(grid: Grid, merge: int, side: int, align_corners: bool) -> tuple[np.ndarray, np.ndarray]:
    """The four entries of a table of side × side that each patch is between, [patches, 4] int64, and their weights,
    float32: bilinear."""
    places = patch_places(grid, merge)
    axes = [_axis_taps(places[:, axis], grid[1 + axis], side, align_corners) for axis in (0, 1)]
    (row_taps, row_weights), (column_taps, column_weights) = axes
    indices = row_taps[:, :, None] * side + column_taps[:, None, :]
    weights = row_weights[:, :, None] * column_weights[:, None, :]
    return indices.reshape(-1, 4), weights.reshape(-1, 4)


def _axis_taps(index: np.ndarray, size: int, side: int, align_corners: bool) -> tuple[np.ndarray, np.ndarray]:
    at = index.astype(np.float32)
    if align_corners:
        source = at * np.float32(side - 1) / np.float32(max(size - 1, 1))
    else:
        source = (at + np.float32(0.5)) * np.float32(side) / np.float32(size) - np.float32(0.5)
    first = np.floor(source)
    offsets = np.arange(2)
    weights = np.clip(1 - np.abs(source[:, None] - first[:, None] - offsets.astype(np.float32)), 0, None)
    taps = np.clip(first.astype(np.int64)[:, None] + offsets, 0, side - 1)
    return taps, weights.astype(np.float32)
