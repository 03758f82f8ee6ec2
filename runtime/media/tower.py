"""The runtime's facts of a model's tower: one class a protocol, free of torch, as the host makes inputs of it.

grids.py has towers that take patches of pictures of any size, packed.py those of them whose processor leaves pictures
whole, and pictures.py those that take whole pictures of one size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

MAX_FEATURES = 16384  # of one run of a tower
Grid = tuple[int, int, int]  # frames, rows and columns of patches


class Read(NamedTuple):
    """An image or video as a tower takes it.

    Attributes:
        pictures: pixels and grid of each frame, or of each picture that it was cut into, in order.
        interval: how far frames are apart on the axis of time.
    """

    pictures: Sequence[tuple[np.ndarray, Grid]]
    interval: float = 1.0


class Largest(NamedTuple):
    """Inputs of a tower at its limits, but for the pixels: only their shape."""

    tower: Tower
    pictures: Sequence[tuple[np.ndarray, Grid]]  # for `tower`, whose pixels are small
    pixel_shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Tower(ABC):
    """A tower, whichever protocol it is of.

    Attributes:
        feature_width: numbers of a feature, those for deeper layers of the text included.
        image_token_id, video_token_id: the tokens that stand for a feature; -1: the model takes no videos.
        sees_ahead: tokens of one picture attend to each other in both directions in the text.
        merge: rows and columns of patches that make one feature.
        axes: of the text's positions, where tokens take features: 1, or 3 for time, row and column.
        has_breaks: tokens that take none may lie between those of one picture.
    """

    feature_width: int
    image_token_id: int
    video_token_id: int = -1
    sees_ahead: bool = False
    has_breaks: bool = False
    merge: int = 1
    axes: int = 1
    counted_inputs: ClassVar[tuple[str, ...]] = ()  # those that name features by their number within a run

    @abstractmethod
    def num_features(self, grid: Grid) -> int:
        """Features of a picture."""

    @abstractmethod
    def input_names(self) -> tuple[str, ...]:
        """The inputs of the tower's program, those of `inputs` and `segments`."""

    @abstractmethod
    def inputs(self, pixels: np.ndarray, grid: Grid) -> dict[str, np.ndarray]:
        """The tower's inputs for a picture; pictures follow each other along the first dimension."""

    @abstractmethod
    def segments(self, grid: Grid) -> dict[str, np.ndarray]:
        """Lengths, in rows of the tower's attention, of what attends to each other, by the input that bounds it."""

    @abstractmethod
    def read(self, tensors: Mapping[str, np.ndarray]) -> Read:
        """An image or video, of what the model's processor gave for it.

        Raises:
            RequestError: it does not fit the tower.
        """

    @abstractmethod
    def sample_grids(self) -> tuple[Grid, Grid]:
        """Grids of two small pictures, different where they can be."""

    @abstractmethod
    def pixel_shape(self, grid: Grid) -> tuple[int, ...]:
        """The shape of a picture's pixels, as `inputs` takes them."""

    @abstractmethod
    def largest(self, features: int) -> Largest:
        """Inputs for about so many features."""
