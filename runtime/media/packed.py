"""Towers that take patches of images of any size, whose processor leaves images whole: they are cut here.

Between the rows of an image's features its prompt has tokens of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.media.grids import GridTower
from mllm_compile.runtime.media.tower import Read

_NAMES = ("pixel_values", "image_sizes")


@dataclass(frozen=True, kw_only=True)
class PackedTower(GridTower):
    """A tower of this protocol.

    Attributes:
        channels: of an image.
        patch_size: rows and columns of pixels of a patch.
    """

    channels: int
    patch_size: int
    axes: int = 1
    has_breaks: bool = True

    def read(self, tensors: Mapping[str, np.ndarray]) -> Read:
        if set(tensors) != set(_NAMES):
            raise RequestError(
                f"an item of the prompt has {', '.join(sorted(tensors)) or 'nothing'}; expected "
                f"{' and '.join(_NAMES)}. The model takes images, and no videos. Send frames as images."
            )
        pixels, sizes = (np.asarray(tensors[name]) for name in _NAMES)
        step = self.patch_size * self.merge
        if sizes.size != 2 or sizes.min() < 1 or (sizes % step).any():
            raise RequestError(
                f"image_sizes is {sizes.tolist()}; expected rows and columns of one image, multiples of {step}, as the "
                "model's processor makes them by the files that belong to it"
            )
        height, width = (int(size) for size in sizes.ravel())
        whole = pixels.shape[2:]
        if pixels.ndim != 4 or pixels.shape[:2] != (1, self.channels) or whole[0] < height or whole[1] < width:
            raise RequestError(
                f"pixel_values has the shape {list(pixels.shape)}; expected [1, {self.channels}, {height}, {width}]"
            )
        image = np.ascontiguousarray(pixels[0, :, :height, :width], dtype=np.float32)
        return Read([(self.cut(image), (1, height // self.patch_size, width // self.patch_size))])

    def cut(self, image: np.ndarray) -> np.ndarray:
        """The patches [features, pixel_width] of an image [channels, rows, columns]; a row has a feature's patches."""
        size, merge = self.patch_size, self.merge
        rows, columns = (length // (size * merge) for length in image.shape[1:])
        blocks = image.reshape(self.channels, rows, merge, size, columns, merge, size)
        return blocks.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, self.pixel_width)
