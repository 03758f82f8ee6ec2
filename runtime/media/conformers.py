"""Towers that take a sound whole, as a conformer does: its convolutions and attention see over the ends of chunks.

Chunks are as long as what attends as one block; each sound begins with one. Rows say which sound they are of, so that
neighbours in a run do not see each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.media.sounds import MASKS, SoundTower, input_of
from mllm_compile.runtime.media.tower import SOUND_INPUT, Grid, Read

_MOST_CHUNKS = 16384  # of a sound: 3.6 hours of the shortest known


@dataclass(frozen=True, kw_only=True)
class ConformerTower(SoundTower):
    """A tower of this protocol; its frames are the first axis of what a processor gives.

    Attributes:
        of_group: features of `merge` rows that follow each other; the last of a sound may lack some.
        is_masked: it is told where sounds end; else those of one length alone can be computed together by the model's
            own forward.
        sampled: frames of the sounds that a check gives it; 0: more than two chunks of one.
    """

    of_group: int = 1
    is_masked: bool = True
    sampled: int = 0
    counted_inputs: ClassVar[tuple[str, ...]] = ("taps", "sounds")

    def num_features(self, grid: Grid) -> int:
        return math.ceil(self.num_rows(grid) / self.merge) * self.of_group

    def num_counted(self, grid: Grid) -> int:
        return grid[0] * self.rows_of(self.frames) // self.merge * self.of_group

    def input_names(self) -> tuple[str, ...]:
        return ("pixel_values", "sounds", "edges", "taps")

    def make_inputs(self, grid: Grid) -> dict[str, np.ndarray]:
        """`taps` [features], `edges` [C] the frames of each chunk, and `sounds` [C] the number of its sound; int64."""
        edges = np.full(grid[0], self.frames)
        edges[-1] = grid[1]
        return {
            "taps": np.arange(self.num_features(grid)),
            "edges": edges,
            "sounds": np.zeros(grid[0], dtype=np.int64),
        }

    def segments(self, grid: Grid) -> dict[str, np.ndarray]:
        return {}

    def read(self, tensors: Mapping[str, np.ndarray]) -> Read:
        given = input_of(tensors)
        if given.ndim != 3 or given.shape[0] != 1 or given.shape[2] != self.bins or not given.size:
            raise RequestError(
                f"{SOUND_INPUT} has the shape {list(given.shape)}; expected [1, frames, {self.bins}], as the model's "
                "processor makes them by the files that belong to it"
            )
        length = self._length(given.shape[1], tensors)
        chunks = math.ceil(length / self.frames)
        if chunks > _MOST_CHUNKS:
            raise RequestError(
                f"a sound has {length:,} frames; expected at most {_MOST_CHUNKS * self.frames:,}. Cut it into parts."
            )
        filled = np.zeros((chunks * self.frames, self.bins), dtype=np.float32)
        filled[:length] = given[0, :length]
        grid: Grid = (chunks, length - (chunks - 1) * self.frames, 0)
        return Read([(filled.reshape(chunks, -1), grid)])

    def _length(self, frames: int, tensors: Mapping[str, np.ndarray]) -> int:
        """The frames that are the sound, by its mask; one that leaves out nothing may be of features."""
        mask = next((np.asarray(tensors[name]) for name in MASKS if name in tensors), None)
        if mask is None:
            return frames
        length = int(np.count_nonzero(mask))
        if length and length == mask.size and (not self.is_masked or mask.shape == (1, frames)):
            return frames
        if mask.shape != (1, frames) or not length or not np.array_equal(mask[0] != 0, np.arange(frames) < length):
            raise RequestError(
                f"the mask of {SOUND_INPUT} has the shape {list(mask.shape)} and {length} frames that are heard; "
                f"expected [1, {frames}], and only those behind the sound's end left out"
            )
        return length

    def sample_grids(self) -> tuple[Grid, Grid]:
        """A sound that ends within its third chunk, and a shorter one where the model's own forward is told of ends."""
        if self.sampled:
            return (1, self.sampled, 0), (1, self.sampled, 0)
        long: Grid = (3, self.frames // 2 + 1, 0)
        return long, (1, self.frames // 2 + 3, 0) if self.is_masked else long

    def filling(self, grid: Grid) -> np.ndarray | None:
        found = np.zeros((grid[0], self.frames, self.bins), dtype=bool)
        found[-1, grid[1] :] = True
        return found.reshape(grid[0], -1)

    def largest(self, features: int) -> list[Grid]:
        return [(math.ceil(features / self.num_counted((1, self.frames, 0))), self.frames, 0)]
