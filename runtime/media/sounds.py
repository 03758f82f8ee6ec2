"""Towers that take sounds: log-mel frames in chunks of one length, the last of a sound filled up behind its end.

Rows of a chunk are what convolutions leave of its frames, and a feature is made of a few rows. Rows attend within a
chunk, or within some chunks that follow each other; rows of the filling are apart, except where a model attends to it.

Shape legend: C chunks, B mel bins, F frames of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.media.tower import SOUND_INPUT, Grid, Read, Tower

MASKS = ("feature_attention_mask", "input_features_mask")
# What convolutions see behind a sound's end: what its processor gave; or nothing, as they see behind a chunk, in a last
# chunk; or that only where it is the first as well.
Edges = Literal["given", "last", "alone"]


@dataclass(frozen=True, kw_only=True)
class SoundTower(Tower):
    """A tower of this protocol. A grid is (chunks, frames of the last one, 0).

    Attributes:
        bins: B.
        frames: F.
        halvings: convolutions that leave a row of two.
        window: chunks that attend to each other; 0: chunks are sounds of their own.
        keeps_filling: rows of the filling become features, too.
        sees_filling: a sound's rows attend to those of its filling.
        edges: what convolutions see behind a sound's end.
    """

    bins: int
    frames: int
    halvings: int = 1
    window: int = 0
    keeps_filling: bool = False
    sees_filling: bool = False
    edges: Edges = "given"
    noun: ClassVar[str] = "sound"
    counted_inputs: ClassVar[tuple[str, ...]] = ("taps",)

    def rows_of(self, frames: int) -> int:
        """Rows that are left of so many frames."""
        for _ in range(self.halvings):
            frames = (frames - 1) // 2 + 1
        return frames

    def num_rows(self, grid: Grid) -> int:
        """Rows of a sound, without its filling."""
        return (grid[0] - 1) * self.rows_of(self.frames) + self.rows_of(grid[1])

    def num_features(self, grid: Grid) -> int:
        rows = grid[0] * self.rows_of(self.frames) if self.keeps_filling else self.num_rows(grid)
        return rows // self.merge

    def num_counted(self, grid: Grid) -> int:
        return grid[0] * self.rows_of(self.frames) // self.merge

    def input_names(self) -> tuple[str, ...]:
        edges = () if self.edges == "given" else ("edges",)
        return ("pixel_values", "cu_seqlens", "taps", *edges)

    def make_inputs(self, grid: Grid) -> dict[str, np.ndarray]:
        """`taps` [features] int64, which of the groups of rows become features; and `edges` [C] int64, frames of each
        chunk behind which there is nothing."""
        found = {"taps": np.arange(self.num_features(grid))}
        if self.edges != "given":
            found["edges"] = np.full(grid[0], self.frames)
            if self.edges == "last" or grid[0] == 1:
                found["edges"][-1] = grid[1]
        return found

    def segments(self, grid: Grid) -> dict[str, np.ndarray]:
        whole = self.rows_of(self.frames)
        if self.sees_filling:
            return {"cu_seqlens": np.full(grid[0], whole, dtype=np.int64)}
        rows, together = self.num_rows(grid), max(1, self.window) * whole
        lengths = [together] * (rows // together) + [rows % together, grid[0] * whole - rows]
        return {"cu_seqlens": np.array([length for length in lengths if length], dtype=np.int64)}

    def read(self, tensors: Mapping[str, np.ndarray]) -> Read:
        """One with chunks of their own is as many images, those left out that are too short for a feature."""
        given = input_of(tensors)
        mask = next((np.asarray(tensors[name]) for name in MASKS if name in tensors), None)
        if given.ndim != 3 or given.shape[1] != self.bins or not given.size:
            raise RequestError(
                f"{SOUND_INPUT} has the shape {list(given.shape)}; expected [windows, {self.bins}, frames], as the "
                "model's processor makes them by the files that belong to it"
            )
        if mask is None:
            mask = np.ones((given.shape[0], given.shape[2]), dtype=bool)
        lengths = np.count_nonzero(mask, axis=-1)
        if (
            mask.shape != (given.shape[0], given.shape[2])
            or not (np.arange(mask.shape[1]) < lengths[:, None]).any(1).all()
        ):
            raise RequestError(
                f"the mask of {SOUND_INPUT} {list(given.shape)} has the shape {list(mask.shape)}, or no frame"
            )
        if not np.array_equal(mask.astype(bool), np.arange(mask.shape[1]) < lengths[:, None]):
            raise RequestError(
                f"the mask of {SOUND_INPUT} leaves out frames before a sound's end; expected those behind it"
            )
        found = [part for one, length in zip(given, lengths, strict=True) for part in self._parts(one, int(length))]
        if not found:
            raise RequestError("a sound is too short for a feature. Give a longer one.")
        return Read(found)

    def _parts(self, given: np.ndarray, length: int) -> list[tuple[np.ndarray, Grid]]:
        """The chunks of a sound of `length` frames, from frames [B, frames] that may have filling."""
        chunks = math.ceil(length / self.frames)
        filled = np.zeros((self.bins, chunks * self.frames), dtype=np.float32)
        shown = min(filled.shape[1], given.shape[1] if self.edges == "given" else length)
        filled[:, :shown] = given[:, :shown]
        rows = np.ascontiguousarray(filled.reshape(self.bins, chunks, -1).swapaxes(0, 1)).reshape(chunks, -1)
        grids: list[Grid] = [(chunks, length - (chunks - 1) * self.frames, 0)]
        if not self.window:
            grids = [(1, self.frames, 0)] * (chunks - 1) + [(1, grids[0][1], 0)]
        parts = np.split(rows, len(grids))
        return [(part, grid) for part, grid in zip(parts, grids, strict=True) if self.num_features(grid)]

    def sample_grids(self) -> tuple[Grid, Grid]:
        """A whole chunk, and a sound that ends within one; behind others, where they attend to each other."""
        part = max(self.frames // 2, self.merge << self.halvings)
        return (1, self.frames, 0), (self.window + 1 if self.window else 1, part, 0)

    def pixel_rows(self, grid: Grid) -> int:
        return grid[0]

    @property
    def pixel_width(self) -> int:
        """A chunk, its bins one after another."""
        return self.bins * self.frames

    def filling(self, grid: Grid) -> np.ndarray | None:
        if self.edges == "given":
            return None
        found = np.zeros((grid[0], self.bins, self.frames), dtype=bool)
        found[-1, :, grid[1] :] = True
        return found.reshape(grid[0], -1)

    def largest(self, features: int) -> list[Grid]:
        one: Grid = (1, self.frames, 0)
        count = math.ceil(features / self.num_features(one))
        return [(count, self.frames, 0)] if self.window else [one] * count


def input_of(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """The input of a tower, as a processor made it of a sound.

    Raises:
        RequestError: it is something else.
    """
    if SOUND_INPUT not in tensors:
        raise RequestError(
            f"an item of the prompt has {', '.join(sorted(tensors)) or 'nothing'}; expected {SOUND_INPUT}. The "
            "model takes sounds."
        )
    return np.asarray(tensors[SOUND_INPUT])
