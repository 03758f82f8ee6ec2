"""Towers that take tiles of an image, whose states some layers of the text attend to: no token takes a feature.

Each image has as many tiles: those behind its own are filled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.media.tower import Grid, Read, Tower

_PIXELS, _IDS, _MASK = "pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"


@dataclass(frozen=True, kw_only=True)
class TileTower(Tower):
    """A tower of this protocol. A grid is 1, the tiles that an image fills, and the number of its aspect ratio.

    Attributes:
        tiles: of each image.
        shape: channels, rows and columns of pixels of a tile.
        states: of a tile.
        ratios: the largest number of an aspect ratio.
        page_size: tokens of a page of the runtime that serves it.
        max_length: most states of a request's images there; 0: it is not known.
    """

    tiles: int
    shape: tuple[int, int, int]
    states: int
    ratios: int
    page_size: int = 1
    max_length: int = 0

    @property
    def states_of_image(self) -> int:
        """States of an image, with filled tiles."""
        return self.tiles * self.states

    def most_states(self, max_model_len: int) -> int:
        """Most states of a request's images: as many as a text may have tokens, and no fewer than one image has."""
        return max(self.states_of_image, max_model_len)

    def num_features(self, grid: Grid) -> int:
        """The tokens that stand for an image."""
        return 1

    def input_names(self) -> tuple[str, ...]:
        return (_PIXELS, _IDS, _MASK)

    def make_inputs(self, grid: Grid) -> dict[str, np.ndarray]:
        """`aspect_ratio_ids` [1] int64, and `aspect_ratio_mask` [1, tiles] int64: 1 where a tile is the image's."""
        return {_IDS: np.array([grid[2]]), _MASK: (np.arange(self.tiles) < grid[1]).astype(np.int64)[None]}

    def segments(self, grid: Grid) -> dict[str, np.ndarray]:
        return {}

    def read(self, tensors: Mapping[str, np.ndarray]) -> Read:
        missing = [name for name in self.input_names() if name not in tensors]
        if missing:
            raise RequestError(
                f"an item of the prompt has no {' and no '.join(missing)}; the model takes images, and no videos, as "
                "its processor makes them"
            )
        pixels, ids, mask = (np.asarray(tensors[name]) for name in self.input_names())
        if pixels.shape != (1, 1, self.tiles, *self.shape) or mask.shape != (1, 1, self.tiles) or ids.shape != (1, 1):
            raise RequestError(
                f"{_PIXELS} has the shape {list(pixels.shape)}; expected [1, 1, {self.tiles}, "
                f"{', '.join(map(str, self.shape))}] beside {_IDS} [1, 1] and {_MASK} [1, 1, {self.tiles}], as the "
                "model's processor makes them by the files that belong to it"
            )
        own, ratio = int(np.count_nonzero(mask)), int(ids[0, 0])
        if not own or not np.array_equal(mask[0, 0] != 0, np.arange(self.tiles) < own) or not 0 < ratio <= self.ratios:
            raise RequestError(
                f"{_IDS} is {ratio} and {_MASK} {mask[0, 0].tolist()}; expected an id from 1 to {self.ratios}, and "
                "an image's tiles ahead of filled ones"
            )
        image = np.ascontiguousarray(pixels, dtype=np.float32).reshape(1, self.pixel_width)
        return Read([(image, (1, own, ratio))])

    def sample_grids(self) -> tuple[Grid, Grid]:
        """One that fills all tiles but one, and one that fills the first."""
        return (1, max(1, self.tiles - 1), self.ratios), (1, 1, 1)

    def pixel_rows(self, grid: Grid) -> int:
        return 1

    @property
    def pixel_width(self) -> int:
        """All tiles, one behind another."""
        return self.tiles * math.prod(self.shape)

    def filling(self, grid: Grid) -> np.ndarray | None:
        return np.repeat(np.arange(self.tiles) >= grid[1], math.prod(self.shape))[None]

    def largest(self, features: int) -> list[Grid]:
        return [(1, self.tiles, 1)]
