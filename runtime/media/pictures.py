"""Towers that take whole pictures of one size, each of which becomes as many features.

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
class PictureTower(Tower):
    """A tower of this protocol.

    Attributes:
        shape: channels, rows and columns of pixels of a picture.
        features: that a picture becomes.
        rows: of the tower's attention, for a picture: its patches, and tokens of the tower's own.
    """

    shape: tuple[int, int, int]
    features: int
    rows: int

    def num_features(self, grid: Grid) -> int:
        return self.features

    def input_names(self) -> tuple[str, ...]:
        return _PIXELS, "cu_seqlens"

    def make_inputs(self, grid: Grid) -> dict[str, np.ndarray]:
        """None: pictures are alike."""
        return {}

    def segments(self, grid: Grid) -> dict[str, np.ndarray]:
        return {"cu_seqlens": np.array([self.rows], dtype=np.int64)}

    def read(self, tensors: Mapping[str, np.ndarray]) -> Read:
        if _PIXELS not in tensors:
            raise RequestError(
                f"an item of the prompt has {', '.join(sorted(tensors)) or 'nothing'}; expected {_PIXELS}. The model "
                "takes images, and no videos. Send frames as images."
            )
        pixels = np.asarray(tensors[_PIXELS])
        pictures = pixels[0] if pixels.ndim == len(self.shape) + 2 and len(pixels) == 1 else pixels
        if pictures.ndim != len(self.shape) + 1 or pictures.shape[1:] != self.shape or not len(pictures):
            raise RequestError(
                f"{_PIXELS} has the shape {list(pixels.shape)}; expected pictures of {list(self.shape)}, as the "
                "model's processor makes them by the files that belong to it"
            )
        if not np.all(tensors.get(_MASK, True)):
            raise RequestError(
                f"{_MASK} leaves out parts of a picture; expected whole ones, as the model's processor makes them by "
                "the files that belong to it"
            )
        pictures = np.ascontiguousarray(pictures, dtype=np.float32)
        return Read([(picture, self.sample_grids()[0]) for picture in pictures.reshape(len(pictures), 1, -1)])

    def sample_grids(self) -> tuple[Grid, Grid]:
        """One grid: pictures are alike."""
        return (1, 1, self.features), (1, 1, self.features)

    def pixel_rows(self, grid: Grid) -> int:
        return 1

    @property
    def pixel_width(self) -> int:
        """A whole picture, its channels one after another."""
        return math.prod(self.shape)

    def largest(self, features: int) -> list[Grid]:
        return [self.sample_grids()[0]] * math.ceil(features / self.features)
