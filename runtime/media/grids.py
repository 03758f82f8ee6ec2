"""Towers that take patches with grids: what such a tower is told of an image besides its patches.

Patches are packed one image after another, each feature's together; patches.py has facts that follow from a grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.media.patches import patch_places, table_taps, windows
from mllm_compile.runtime.media.tower import Grid, Read, Tower

_OF_IMAGES = ("pixel_values", "image_grid_thw")
_OF_VIDEOS = ("pixel_values_videos", "video_grid_thw")
_SECONDS = "second_per_grid_ts"  # between frames of a video


@dataclass(frozen=True, kw_only=True)
class GridTower(Tower):
    """A tower of this protocol.

    Attributes:
        patch_width: numbers of a patch.
        window: rows and columns of features that attend to each other in layers with windows; 0: no windows.
        table_side: rows and columns of the learned table of places that is spread over an image; 0: no table.
        align_corners: the table's corners are on the image's, else its edges on the image's edges.
        bicubic: the table is interpolated between 16 entries, else between 4.
        ticks_per_second: of a video, positions on the axis of time; 0: its frames are one apart.
    """

    patch_width: int
    window: int = 0
    table_side: int = 0
    align_corners: bool = False
    bicubic: bool = False
    ticks_per_second: int = 0
    axes: int = 3
    counted_inputs: ClassVar[tuple[str, ...]] = ("window_index",)

    @property
    def taps(self) -> int:
        """Entries of the table for a patch."""
        return 16 if self.bicubic else 4

    def num_features(self, grid: Grid) -> int:
        return grid[0] * grid[1] * grid[2] // self.merge**2

    def input_names(self) -> tuple[str, ...]:
        names = ["pixel_values", "position_ids", "cu_seqlens"]
        names += ["interp_indices", "interp_weights"] if self.table_side else []
        return (*names, *(["window_index", "cu_window_seqlens"] if self.window else []))

    def make_inputs(self, grid: Grid) -> dict[str, np.ndarray]:
        """[F features, …] each."""
        features, unit = self.num_features(grid), self.merge**2
        found = {"position_ids": patch_places(grid, self.merge).reshape(features, unit, 2)}
        if self.table_side:
            indices, weights = table_taps(grid, self.merge, self.table_side, self.align_corners, self.bicubic)
            found["interp_indices"] = indices.reshape(features, unit, self.taps)
            found["interp_weights"] = weights.reshape(features, unit, self.taps)
        if self.window:
            found["window_index"] = windows(grid, self.merge, self.window)[0]
        return found

    def segments(self, grid: Grid) -> dict[str, np.ndarray]:
        found = {"cu_seqlens": np.full(grid[0], grid[1] * grid[2], dtype=np.int64)}
        if self.window:
            found["cu_window_seqlens"] = windows(grid, self.merge, self.window)[1]
        return found

    def read(self, tensors: Mapping[str, np.ndarray]) -> Read:
        """Frames of a video do not attend to each other: each is an image."""
        is_video = _OF_VIDEOS[0] in tensors
        names = _OF_VIDEOS if is_video else _OF_IMAGES
        if not set(names) <= set(tensors) <= {*names, _SECONDS}:
            raise RequestError(
                f"an item of the prompt has {', '.join(sorted(tensors)) or 'nothing'}; expected "
                f"{' and '.join(_OF_IMAGES)}, or {' and '.join(_OF_VIDEOS)}"
            )
        if is_video and self.video_token_id < 0:
            raise RequestError("the model takes images, and no videos. Send frames as images.")
        pixels, grids = (np.asarray(tensors[name]) for name in names)
        if grids.size != 3 or grids.min() < 1:
            raise RequestError(
                f"{names[1]} is {grids.tolist()}; expected frames, rows and columns of one image or video"
            )
        frames, rows, columns = (int(size) for size in grids.ravel())
        if rows % self.merge or columns % self.merge:
            raise RequestError(
                f"an image has {rows} × {columns} patches; expected multiples of {self.merge}, as the model's "
                "processor makes them"
            )
        count = rows * columns
        if pixels.shape != (frames * count, self.patch_width):
            raise RequestError(
                f"{names[0]} has the shape {list(pixels.shape)}; expected [{frames * count}, {self.patch_width}] "
                f"for a grid of {frames} × {rows} × {columns} patches"
            )
        pixels = np.ascontiguousarray(pixels, dtype=np.float32).reshape(frames, -1, self.pixel_width)
        seconds = float(np.asarray(tensors.get(_SECONDS, 1.0)).ravel()[0])
        interval = self.ticks_per_second * seconds if is_video and self.ticks_per_second else 1.0
        return Read([(frame, (1, rows, columns)) for frame in pixels], interval)

    def sample_grids(self) -> tuple[Grid, Grid]:
        """A whole window and parts of some among them."""
        side, merge = self.window + 1, self.merge
        return (1, 2 * merge, 3 * merge), (1, side * merge, (side + 1) * merge)

    def pixel_rows(self, grid: Grid) -> int:
        return self.num_features(grid)

    @property
    def pixel_width(self) -> int:
        """The patches of a feature, one after another."""
        return self.merge**2 * self.patch_width

    def largest(self, features: int) -> list[Grid]:
        """Each feature is a frame of its own: that attention is short, and takes no less memory."""
        return [(features, self.merge, self.merge)]
