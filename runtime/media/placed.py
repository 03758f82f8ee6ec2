"""Towers that take patches with the place of each, whose processor cuts images: Gemma 4.

Patches of less than an image are padding; a feature's patches are put together here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.media.grids import GridTower
from mllm_compile.runtime.media.tower import Read

_NAMES = ("pixel_values", "image_position_ids")


@dataclass(frozen=True, kw_only=True)
class PlacedTower(GridTower):
    """A tower of this protocol."""

    axes: int = 1
    sees_ahead_in_windows: bool = True

    def read(self, tensors: Mapping[str, np.ndarray]) -> Read:
        if not set(_NAMES) <= set(tensors):
            raise RequestError(
                f"an item of the prompt has {', '.join(sorted(tensors)) or 'nothing'}; expected "
                f"{' and '.join(_NAMES)}. The model takes images, and no videos. Send frames as images."
            )
        pixels, places = (np.asarray(tensors[name]) for name in _NAMES)
        if places.ndim != 3 or pixels.shape != (1, places.shape[1], self.patch_width):
            raise RequestError(
                f"pixel_values has the shape {list(pixels.shape)}; expected [1, {places.shape[-2]}, "
                f"{self.patch_width}], a patch for each of image_position_ids"
            )
        is_patch = (places[0] >= 0).all(-1)
        columns, rows = (int(most) + 1 for most in places[0].max(0))
        order = np.lexsort((places[0, :, 0], places[0, :, 1], ~is_patch))[: rows * columns]
        expected = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), -1).reshape(-1, 2)
        if rows % self.merge or columns % self.merge or not np.array_equal(places[0][order], expected):
            raise RequestError(
                f"image_position_ids has {int(is_patch.sum())} places up to column {columns - 1} of row {rows - 1}; "
                f"expected each place of an image once, of rows and columns that are multiples of {self.merge}"
            )
        merge, whole = self.merge, pixels[0][order].astype(np.float32)
        blocks = whole.reshape(rows // merge, merge, columns // merge, merge, self.patch_width).swapaxes(1, 2)
        return Read([(np.ascontiguousarray(blocks).reshape(-1, self.pixel_width), (1, rows, columns))])
