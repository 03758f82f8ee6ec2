"""Towers that take whole images of one size; each image becomes as many features.

An image may be several of them: parts of it, and all of it made small, as its processor cuts it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.media.tower import Grid, Read, Tower

_PIXELS = "pixel_values"
_MASK = "pixel_attention_mask"


@dataclass(frozen=True, kw_only=True)
class FixedSizeTower(Tower):
    """A tower of this protocol.

    Attributes:
        shape: channels, rows and columns of pixels of an image.
        features: that an image becomes.
        rows: of the tower's attention, for an image: its patches, and tokens of the tower's own; 0: it attends to no
            segments of rows.
    """

    shape: tuple[int, int, int]
    features: int
    rows: int

    def num_features(self, grid: Grid) -> int:
        return self.features

    def input_names(self) -> tuple[str, ...]:
        return (_PIXELS, "cu_seqlens") if self.rows else (_PIXELS,)

    def make_inputs(self, grid: Grid) -> dict[str, np.ndarray]:
        """None: images are alike."""
        return {}

    def segments(self, grid: Grid) -> dict[str, np.ndarray]:
        return {"cu_seqlens": np.array([self.rows], dtype=np.int64)} if self.rows else {}

    def read(self, tensors: Mapping[str, np.ndarray]) -> Read:
        if _PIXELS not in tensors:
            raise RequestError(
                f"an item of the prompt has {', '.join(sorted(tensors)) or 'nothing'}; expected {_PIXELS}. The model "
                "takes images, and no videos. Send frames as images."
            )
        pixels = np.asarray(tensors[_PIXELS])
        images = pixels[0] if pixels.ndim == len(self.shape) + 2 and len(pixels) == 1 else pixels
        if images.ndim != len(self.shape) + 1 or images.shape[1:] != self.shape or not len(images):
            raise RequestError(
                f"{_PIXELS} has the shape {list(pixels.shape)}; expected images of {list(self.shape)}, as the "
                "model's processor makes them by the files that belong to it"
            )
        if not np.all(tensors.get(_MASK, True)):
            raise RequestError(
                f"{_MASK} leaves out parts of an image; expected whole ones, as the model's processor makes them by "
                "the files that belong to it"
            )
        images = np.ascontiguousarray(images, dtype=np.float32)
        return Read([(image, self.sample_grids()[0]) for image in images.reshape(len(images), 1, -1)])

    def sample_grids(self) -> tuple[Grid, Grid]:
        """One grid: images are alike."""
        return (1, 1, self.features), (1, 1, self.features)

    def pixel_rows(self, grid: Grid) -> int:
        return 1

    @property
    def pixel_width(self) -> int:
        """A whole image, its channels one after another."""
        return math.prod(self.shape)

    def largest(self, features: int) -> list[Grid]:
        return [self.sample_grids()[0]] * math.ceil(features / self.features)
