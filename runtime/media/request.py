"""A request's images: what each is for the tower, the prompt's positions, and its keys in the prefix cache.

Made once, when a request comes (`RequestMedia.of`); the scheduler asks where images lie, the step runner what they are.
Free of torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.media.grids import MAX_FEATURES, Grid, GridTower
from mllm_compile.runtime.media.positions import positions_of

_PIXELS, _GRID = "pixel_values", "image_grid_thw"
_DIGEST_BYTES = 32


@dataclass(frozen=True, eq=False)
class Image:
    """One image of a prompt.

    Attributes:
        start, end: its tokens, each of which takes a feature.
        digest: equal for images with the same features.
        grid: its patches.
        pixels: [patches, width] float32.
    """

    start: int
    end: int
    digest: bytes
    grid: Grid
    pixels: np.ndarray


@dataclass(frozen=True, eq=False)
class RequestMedia:
    """The images of a request, N tokens of its prompt.

    Attributes:
        images: in order of their tokens.
        positions: [3, N] int64.
        delta: the position of a token behind the prompt, less its index.
        keys: [N] int64: token ids, where a token takes a feature a negative number of the image and the place in it.
        is_feature: [N] bool.
    """

    images: tuple[Image, ...]
    positions: np.ndarray
    delta: int
    keys: np.ndarray
    is_feature: np.ndarray

    @classmethod
    def of(
        cls,
        tower: GridTower,
        token_ids: Sequence[int],
        is_feature: np.ndarray,
        items: Sequence[tuple[int, int, bytes, Mapping[str, np.ndarray]]],
    ) -> RequestMedia:
        """
        Args:
            tower: the model's.
            token_ids: N ids, a placeholder for each feature.
            is_feature: [N] bool.
            items: start, length, digest and what the processor gave, of each image.

        Raises:
            RequestError: tokens and images do not fit each other, or an image not the tower.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        images = tuple(_image(tower, *item) for item in items)
        expected = np.zeros(ids.size, dtype=bool)
        keys, end = ids.copy(), 0
        for image in images:
            if image.start < end or image.end > ids.size:
                raise RequestError(
                    f"an image's tokens are {image.start} to {image.end - 1} of a prompt of {ids.size}, and the image "
                    f"before ends at {end}: expected images in order, within the prompt"
                )
            end = image.end
            expected[image.start : end] = True
            keys[image.start : end] = _keys(image)
        if not np.array_equal(expected, np.asarray(is_feature)):
            raise RequestError(
                f"{int(np.count_nonzero(is_feature))} tokens take features, at other places than the images' "
                f"{int(np.count_nonzero(expected))}. Each image's tokens are to lie one after another."
            )
        if not np.array_equal(expected, ids == tower.image_token_id):
            raise RequestError(
                f"{int(np.count_nonzero(ids == tower.image_token_id))} tokens of the prompt are the image's "
                f"placeholder ({tower.image_token_id}), but its images have {int(np.count_nonzero(expected))} "
                "features. Give as many images as the prompt has places for, and let the model's processor expand them."
            )
        positions, delta = positions_of(ids.size, ((image.start, image.grid) for image in images), tower.merge)
        return cls(images, positions, delta, keys, expected)

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.is_feature.size

    def num_images_before(self, token: int) -> int:
        """Images that end at or before a token."""
        return sum(image.end <= token for image in self.images)

    def text_positions(self, start: int, length: int) -> np.ndarray:
        """Positions [length] of tokens that take no features, counted from the prompt's first."""
        index = np.arange(start, start + length)
        known = min(max(self.num_tokens - start, 0), length)
        return np.concatenate((self.positions[0, start : start + known], index[known:] + self.delta))

    def all_positions(self, start: int, length: int) -> np.ndarray:
        """Positions [3, length] of any tokens."""
        positions = np.broadcast_to(np.arange(start, start + length) + self.delta, (3, length)).copy()
        known = self.positions[:, start : start + length]
        positions[:, : known.shape[1]] = known
        return positions


def _image(tower: GridTower, start: int, length: int, digest: bytes, tensors: Mapping[str, np.ndarray]) -> Image:
    unknown = sorted(set(tensors) - {_PIXELS, _GRID})
    if unknown or len(tensors) < 2:
        raise RequestError(
            f"an item of the prompt has {', '.join(sorted(tensors)) or 'nothing'}; expected an image's {_PIXELS} and "
            f"{_GRID}. Videos are not served yet."
        )
    pixels, grids = np.asarray(tensors[_PIXELS]), np.asarray(tensors[_GRID])
    if grids.size != 3 or grids.min() < 1:
        raise RequestError(f"{_GRID} is {grids.tolist()}; expected frames, rows and columns of one image")
    frames, rows, columns = (int(size) for size in grids.ravel())
    grid = (frames, rows, columns)
    if rows % tower.merge or columns % tower.merge:
        raise RequestError(
            f"an image has {rows} × {columns} patches; expected multiples of {tower.merge}, as the model's processor "
            "makes them"
        )
    if pixels.shape != (frames * rows * columns, tower.patch_width):
        raise RequestError(
            f"{_PIXELS} has the shape {list(pixels.shape)}; expected [{frames * rows * columns}, {tower.patch_width}] "
            f"for a grid of {frames} × {rows} × {columns} patches"
        )
    features = tower.num_features(grid)
    if features != length:
        raise RequestError(f"an image has {features} features, and the prompt {length} tokens for it")
    if features > MAX_FEATURES:
        raise RequestError(f"an image has {features} features, and at most {MAX_FEATURES} are served. Make it smaller.")
    if len(digest) != _DIGEST_BYTES:
        raise RequestError(f"an image's digest has {len(digest)} bytes; expected {_DIGEST_BYTES}")
    return Image(start, start + length, digest, grid, np.ascontiguousarray(pixels, dtype=np.float32))


def _keys(image: Image) -> np.ndarray:
    """A number below zero for each token of an image, which no other image's token has: of 63 bits of a hash."""
    stream = hashlib.shake_256(image.digest).digest(8 * (image.end - image.start))
    return -1 - (np.frombuffer(stream, dtype="<i8") & np.int64(2**63 - 1))
