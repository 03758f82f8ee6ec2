"""The runtime's facts of a model's tower: one class a protocol, free of torch, as the host makes inputs of it.

grids.py has towers that take patches of images of any size; packed.py is for processors that leave images whole.
fixed_size.py has towers that take whole images of one size; crops.py is for those that put crops together.
sounds.py has towers that take sounds, which are "images" and "pixels" in what all of them share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

MAX_FEATURES = 16384  # of an image
# Of the images that one run of a tower encodes: enough to fill a GPU, few enough that the host prepares the next run
# meanwhile. An image with more is a run of its own.
FEATURES_OF_A_RUN = 1024
_KEPT_GRIDS = 16  # up to 4 MB each
SOUND_INPUT = "input_features"  # what processors call a sound
Grid = tuple[int, int, int]  # frames, rows and columns of patches


class Read(NamedTuple):
    """An image or video as a tower takes it.

    Attributes:
        images: pixels [pixel_rows, pixel_width] float32 and grid of each frame, or of each image that it was cut
            into, in order.
        interval: how far frames are apart on the axis of time.
    """

    images: Sequence[tuple[np.ndarray, Grid]]
    interval: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Tower(ABC):
    """A tower, whichever protocol it is of.

    Attributes:
        feature_width: numbers of a feature, those for deeper layers of the text included.
        image_token_id, video_token_id: the tokens that stand for a feature; -1: the model takes no videos.
        sees_ahead: tokens of one image attend to each other in both directions in the text.
        sees_ahead_in_windows: they do in its layers with windows alone.
        merge: rows and columns of patches that make one feature.
        axes: of the text's positions, where tokens take features: 1, or 3 for time, row and column.
        has_breaks: tokens without a feature may be between tokens of one image.
        sound: of a model with images, the tower of its sounds; None: it takes none.
    """

    feature_width: int
    image_token_id: int
    video_token_id: int = -1
    sees_ahead: bool = False
    sees_ahead_in_windows: bool = False
    has_breaks: bool = False
    merge: int = 1
    axes: int = 1
    sound: Any = None  # a Tower; json_data.py reads no type that holds itself
    noun: ClassVar[str] = "image"  # what it takes, in errors
    counted_inputs: ClassVar[tuple[str, ...]] = ()  # those that name what num_counted counts, by its number in a run

    @property
    def placeholders(self) -> tuple[int, ...]:
        """The tokens that stand for features, of sounds too."""
        of_sounds = () if self.sound is None else (self.sound.image_token_id,)
        return tuple({token for token in (self.image_token_id, self.video_token_id, *of_sounds) if token >= 0})

    def of(self, tensors: Mapping[str, np.ndarray]) -> Tower:
        """The tower for an item, of what the model's processor gave for it."""
        return self if SOUND_INPUT not in tensors else self.one(is_sound=True)

    def one(self, is_sound: bool) -> Tower:
        """This tower, or that of sounds which the model has beside it."""
        beside: Tower | None = self.sound
        return beside if is_sound and beside is not None else self

    @abstractmethod
    def num_features(self, grid: Grid) -> int:
        """Features of an image."""

    def num_counted(self, grid: Grid) -> int:
        """The numbers that an image adds to counted inputs: its features."""
        return self.num_features(grid)

    @abstractmethod
    def input_names(self) -> tuple[str, ...]:
        """The inputs of the tower's program: `pixel_values`, `inputs` and `segments`."""

    def inputs(self, grid: Grid) -> Mapping[str, np.ndarray]:
        """The tower's inputs for an image beside its pixels; images follow each other along the first dimension.
        Do not write to them: the last grids' are kept."""
        return _inputs_of(self, grid)

    @abstractmethod
    def make_inputs(self, grid: Grid) -> dict[str, np.ndarray]:
        """New arrays, as `inputs`."""

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
        """Grids of two small images, different where they can be."""

    @abstractmethod
    def pixel_rows(self, grid: Grid) -> int:
        """Rows of an image in the input `pixel_values`, each of pixel_width numbers."""

    def filling(self, grid: Grid) -> np.ndarray | None:
        """[pixel_rows, pixel_width] bool, where pixels are zero as `read` makes them; None: nowhere."""
        return None

    @property
    @abstractmethod
    def pixel_width(self) -> int:
        """Numbers of a row of `pixel_values`."""

    @abstractmethod
    def largest(self, features: int) -> list[Grid]:
        """Images that have about so many features, and as much of everything else as these can have."""


@lru_cache(maxsize=_KEPT_GRIDS)
def _inputs_of(tower: Tower, grid: Grid) -> Mapping[str, np.ndarray]:
    return tower.make_inputs(grid)
