"""Towers that take crops of an image besides all of it made small: LLaVA-NeXT, LLaVA-OneVision.

The crops' features form one large image: padding is left out, too many features are made fewer, and a feature that all
images share ends each row. So each feature is a sum of a few of the tower's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.media.fixed_size import FixedSizeTower
from mllm_compile.runtime.media.patches import axis_taps
from mllm_compile.runtime.media.tower import Grid, Read

_OF_IMAGES = ("pixel_values", "image_sizes")
_OF_VIDEOS = "pixel_values_videos"
_FRAME, _LAST_FRAME = (1, 0, 0), (1, 0, 1)  # of a video; the last one's features are ended as a row is
_NO_LARGER = 1.1  # times a side that has the most features: such an image is not made smaller


@dataclass(frozen=True, kw_only=True)
class CropTower(FixedSizeTower):
    """A tower of this protocol. A grid is how many inputs the tower takes of an image, and the image's rows
    and columns of pixels; a single input is the image made small.

    Attributes:
        pinpoints: rows and columns of pixels that an image may be scaled to, which are cut into crops.
        most_crops: crops whose features an image has at most, and is made smaller above; 0: it is never.
    """

    pinpoints: tuple[tuple[int, int], ...]
    most_crops: int = 0
    counted_inputs: ClassVar[tuple[str, ...]] = ("taps",)

    @property
    def side(self) -> int:
        """Rows and columns of an image's features."""
        return math.isqrt(self.features)

    @property
    def num_taps(self) -> int:
        """Features of the tower that one of the program's is made of."""
        return 4 if self.most_crops or self.video_token_id >= 0 else 1

    def crops(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the crops of an image of so many rows and columns of pixels."""
        best, wanted = (0.0, -math.inf), self.pinpoints[0]
        for rows, columns in self.pinpoints:
            scale = min(columns / width, rows / height)
            used = min(int(width * scale) * int(height * scale), width * height)
            if (used, used - rows * columns) > best:  # shows most of it, and then wastes least
                best, wanted = (used, used - rows * columns), (rows, columns)
        return wanted[0] // self.shape[1], wanted[1] // self.shape[2]

    def num_features(self, grid: Grid) -> int:
        count: int = self.inputs(grid)["taps"].shape[0]
        return count

    def num_counted(self, grid: Grid) -> int:
        return grid[0] * self.features

    def input_names(self) -> tuple[str, ...]:
        weights = ("tap_weights",) if self.num_taps > 1 else ()
        return (*super().input_names(), "taps", "is_row_end", *weights)

    def make_inputs(self, grid: Grid) -> dict[str, np.ndarray]:
        """`taps` [N features, num_taps] int64, of the tower's features; `is_row_end` [N] bool: it is the shared one;
        and `tap_weights` [N, num_taps] float32 where there are several."""
        parts = [*self._parts(grid)]
        taps, weights, is_end = (np.concatenate(members) for members in zip(*parts, strict=True))
        found = {"taps": taps[:, : self.num_taps], "is_row_end": is_end}
        return found | ({"tap_weights": weights} if self.num_taps > 1 else {})

    def segments(self, grid: Grid) -> dict[str, np.ndarray]:
        return {"cu_seqlens": np.full(grid[0], self.rows, dtype=np.int64)}

    def read(self, tensors: Mapping[str, np.ndarray]) -> Read:
        if _OF_VIDEOS in tensors:
            return self._read_video(np.asarray(tensors[_OF_VIDEOS]))
        if not set(_OF_IMAGES) <= set(tensors):
            raise RequestError(
                f"an item of the prompt has {', '.join(sorted(tensors)) or 'nothing'}; expected "
                f"{' and '.join(_OF_IMAGES)}"
            )
        pixels, sizes = (np.asarray(tensors[name]) for name in _OF_IMAGES)
        if sizes.size != 2 or sizes.min() < 1:
            raise RequestError(f"image_sizes is {sizes.tolist()}; expected rows and columns of one image's pixels")
        height, width = (int(size) for size in sizes.ravel())
        count = 1 + math.prod(self.crops(height, width))
        if pixels.shape not in ((1, 1, *self.shape), (1, count, *self.shape)):
            raise RequestError(
                f"pixel_values has the shape {list(pixels.shape)}; expected {[1, count, *self.shape]}, all of an image "
                f"of {height} × {width} pixels and its crops, or [1, 1, …], as the model's processor makes them by the "
                "files that belong to it"
            )
        rows = np.ascontiguousarray(pixels[0], dtype=np.float32).reshape(pixels.shape[1], -1)
        return Read([(rows, (len(rows), height, width))])

    def _read_video(self, frames: np.ndarray) -> Read:
        if self.video_token_id < 0:
            raise RequestError("the model takes images, and no videos. Send frames as images.")
        if frames.ndim != 5 or frames.shape[2:] != self.shape or len(frames) != 1 or not frames.shape[1]:
            raise RequestError(
                f"{_OF_VIDEOS} has the shape {list(frames.shape)}; expected {[1, 'frames', *self.shape]}, as the "
                "model's processor makes them by the files that belong to it"
            )
        pixels = np.ascontiguousarray(frames[0], dtype=np.float32).reshape(frames.shape[1], 1, -1)
        return Read([(frame, _FRAME) for frame in pixels[:-1]] + [(pixels[-1], _LAST_FRAME)])

    def sample_grids(self) -> tuple[Grid, Grid]:
        """An image whose crops are whole, and one with crops that are padded."""
        height, width = min(self.pinpoints, key=math.prod)
        sizes = (height, width), (height, max(1, width * 2 // 3))
        first, second = ((1 + math.prod(self.crops(*size)), *size) for size in sizes)
        return first, second

    def pixel_rows(self, grid: Grid) -> int:
        return grid[0]

    def largest(self, features: int) -> list[Grid]:
        """One image with the most crops, where they have more features than that: it is never cut."""
        rows, columns = max(self.pinpoints, key=math.prod)
        count = 1 + math.prod(self.crops(rows, columns))
        if count * self.features >= features:
            return [(count, rows, columns)]
        return [(1, self.shape[1], self.shape[2])] * math.ceil(features / self.features)

    def _parts(self, grid: Grid) -> Iterator[_Part]:
        """The features of an image's parts: all of it made small, and the crops'."""
        count, height, width = grid
        side = self.side
        if not height:
            half = math.ceil(side / 2)
            yield _spread((half, half), (side, side), np.arange(self.features).reshape(side, side), ends=False)
        else:
            yield _whole(np.arange(self.features)[:, None])
        if count == 1:
            if grid != _FRAME:
                yield _END
            return
        kept = self._kept(height, width)
        rows, columns = kept.shape
        smaller = self._made_smaller(rows, columns)
        if smaller is None:
            yield _with_ends(_whole(kept.reshape(-1, 1)), rows, columns)
        else:
            yield _spread(smaller, kept.shape, kept, ends=True)

    def _kept(self, height: int, width: int) -> np.ndarray:
        """The crops' features [rows, columns] that show the image and not what pads it, by their number."""
        down, across = self.crops(height, width)
        side = self.side
        of_crops = self.features + np.arange(down * across * self.features).reshape(down, across, side, side)
        index = of_crops.transpose(0, 2, 1, 3).reshape(down * side, across * side)
        rows, columns = index.shape
        if width / height > columns / rows:
            padding = (rows - int(round(height * (columns / width), 7))) // 2
            return index[padding : rows - padding]
        padding = (columns - int(round(width * (rows / height), 7))) // 2
        return index[:, padding : columns - padding]

    def _made_smaller(self, rows: int, columns: int) -> tuple[int, int] | None:
        """Rows and columns of features that an image with so many is made of; None: of all."""
        if not self.most_crops:
            return None
        ratio = math.sqrt(rows * columns / (self.most_crops * self.side**2))
        return (int(rows // ratio), int(columns // ratio)) if ratio > _NO_LARGER else None


_Part = tuple[np.ndarray, np.ndarray, np.ndarray]  # taps [N, 4], weights [N, 4], is_end [N]


def _whole(index: np.ndarray) -> _Part:
    """The features `index` [N, 1] as they are."""
    taps, weights = index.repeat(4, axis=1), np.zeros((len(index), 4), dtype=np.float32)
    weights[:, 0] = 1
    return taps, weights, np.zeros(len(index), dtype=bool)


_END: _Part = (np.zeros((1, 4), dtype=np.int64), np.zeros((1, 4), dtype=np.float32), np.ones(1, dtype=bool))


def _with_ends(part: _Part, rows: int, columns: int) -> _Part:
    """The part, of so many rows, with an end behind each."""

    def ended(member: np.ndarray, end: np.ndarray) -> np.ndarray:
        whole = member.reshape(rows, columns, *member.shape[1:])
        joined = np.concatenate((whole, np.broadcast_to(end, (rows, *end.shape))), axis=1)
        return joined.reshape(rows * (columns + 1), *member.shape[1:])

    taps, weights, is_end = part
    return ended(taps, _END[0]), ended(weights, _END[1]), ended(is_end, _END[2])


def _spread(size: tuple[int, int], of: Sequence[int], index: np.ndarray, ends: bool) -> _Part:
    """Features `index` [rows, columns], of that size, made `size` by bilinear interpolation."""
    (row_taps, row_weights), (column_taps, column_weights) = (
        axis_taps(np.arange(length), length, side) for length, side in zip(size, of, strict=True)
    )
    taps = index[row_taps[:, None, :, None], column_taps[None, :, None, :]].reshape(-1, 4)
    weights = (row_weights[:, None, :, None] * column_weights[None, :, None, :]).reshape(-1, 4)
    part = taps, weights, np.zeros(len(taps), dtype=bool)
    return _with_ends(part, *size) if ends else part
