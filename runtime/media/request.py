"""A request's images and frames of videos: what each is for the tower, the prompt's positions, and its cache keys.

Made once, when a request comes (`RequestMedia.of`); the scheduler asks where images lie, the step runner what they are.
Free of torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.media.grids import MAX_FEATURES, Grid, GridTower
from mllm_compile.runtime.media.positions import Placed, positions_of

_OF_IMAGES = ("pixel_values", "image_grid_thw")
_OF_VIDEOS = ("pixel_values_videos", "video_grid_thw")
_SECONDS = "second_per_grid_ts"  # between frames of a video
_DIGEST_BYTES = 32


@dataclass(frozen=True, eq=False)
class Image:
    """One image of a prompt, or a frame of a video: frames do not attend to each other in a tower.

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
            items: start, length, digest and what the processor gave, of each image or video.

        Raises:
            RequestError: tokens and images do not fit each other, or an image not the tower.
        """
        ids, is_feature = np.asarray(token_ids, dtype=np.int64), np.asarray(is_feature, dtype=bool)
        if not ids.size:
            raise RequestError("the prompt is empty; a request needs at least one token to compute")
        if is_feature.size != ids.size:
            raise RequestError(f"is_feature has {is_feature.size} values for a prompt of {ids.size} tokens")
        expected = np.zeros(ids.size, dtype=bool)
        keys, end = ids.copy(), 0
        images: list[Image] = []
        placed: list[Placed] = []
        for item in items:
            start, length = item[:2]
            if start < end or start + length > ids.size:
                raise RequestError(
                    f"an image's tokens are {start} to {start + length - 1} of a prompt of {ids.size}, and the image "
                    f"before ends at {end}: expected images in order, within the prompt"
                )
            end = start + length
            own, grids = _images(tower, item, is_feature)
            images, placed = images + own, placed + grids
            for image in own:
                expected[image.start : image.end] = True
                keys[image.start : image.end] = _keys(image)
        if not np.array_equal(expected, is_feature):
            raise RequestError(
                f"{int(np.count_nonzero(is_feature))} tokens take features, at other places than the images' "
                f"{int(np.count_nonzero(expected))}"
            )
        stands = (ids == tower.image_token_id) | (ids == tower.video_token_id)
        if not np.array_equal(expected, stands):
            raise RequestError(
                f"{int(np.count_nonzero(stands))} tokens of the prompt are placeholders ({tower.image_token_id} of "
                f"images), but its images have {int(np.count_nonzero(expected))} features. Give as many images as the "
                "prompt has places for, and let the model's processor expand them."
            )
        positions, delta = positions_of(ids.size, placed, tower.merge)
        return cls(tuple(images), positions, delta, keys, expected)

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.is_feature.size

    def images_within(self, start: int, end: int) -> Iterator[Image]:
        """The images of which there are tokens in [start, end)."""
        for image in self.images:
            if image.start >= end:
                break
            if image.end > start:
                yield image

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


def _images(
    tower: GridTower, item: tuple[int, int, bytes, Mapping[str, np.ndarray]], is_feature: np.ndarray
) -> tuple[list[Image], list[Placed]]:
    """An item's images, each frame of a video one, and where its grids are."""
    start, length, digest, tensors = item
    pixels, grid, is_video = _checked(tower, tensors)
    if len(digest) != _DIGEST_BYTES:
        raise RequestError(f"an image's digest has {len(digest)} bytes; expected {_DIGEST_BYTES}")
    frames, rows, columns = grid
    places = start + np.flatnonzero(is_feature[start : start + length])
    features = tower.num_features(grid)
    if features != places.size:
        raise RequestError(f"an image has {features} features, and the prompt {places.size} tokens for it")
    of_frame = (1, rows, columns)
    tower.inputs(of_frame)  # made here, on the caller's thread, and found when a step needs it
    if features // frames > MAX_FEATURES:
        raise RequestError(
            f"an image has {features // frames} features, and at most {MAX_FEATURES} are served. Make it smaller."
        )
    images = []
    for frame, own in enumerate(places.reshape(frames, -1)):
        if own[-1] - own[0] + 1 != own.size:
            raise RequestError("the tokens of an image, or of a video's frame, are to lie one after another")
        frame_digest = digest if frames == 1 else hashlib.sha256(digest + frame.to_bytes(4, "little")).digest()
        part = pixels[frame * rows * columns : (frame + 1) * rows * columns]
        images.append(Image(int(own[0]), int(own[-1]) + 1, frame_digest, of_frame, part))
    if len(images) > 1 and images[0].end != images[1].start:  # text between frames says when they are
        return images, [Placed(image.start, of_frame) for image in images]
    seconds = float(np.asarray(tensors.get(_SECONDS, 1.0)).ravel()[0])
    interval = tower.ticks_per_second * seconds if is_video and tower.ticks_per_second else 1.0
    return images, [Placed(images[0].start, grid, interval)]


def _checked(tower: GridTower, tensors: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Grid, bool]:
    """An item's pixels [patches, patch_width] float32 and grid, and whether it is a video."""
    is_video = _OF_VIDEOS[0] in tensors
    names = _OF_VIDEOS if is_video else _OF_IMAGES
    if not set(names) <= set(tensors) <= {*names, _SECONDS}:
        raise RequestError(
            f"an item of the prompt has {', '.join(sorted(tensors)) or 'nothing'}; expected "
            f"{' and '.join(_OF_IMAGES)}, or {' and '.join(_OF_VIDEOS)}"
        )
    if is_video and tower.video_token_id < 0:
        raise RequestError("the model takes images, and no videos. Send frames as images.")
    pixels, grids = (np.asarray(tensors[name]) for name in names)
    if grids.size != 3 or grids.min() < 1:
        raise RequestError(f"{names[1]} is {grids.tolist()}; expected frames, rows and columns of one image or video")
    frames, rows, columns = (int(size) for size in grids.ravel())
    if rows % tower.merge or columns % tower.merge:
        raise RequestError(
            f"an image has {rows} × {columns} patches; expected multiples of {tower.merge}, as the model's processor "
            "makes them"
        )
    if pixels.shape != (frames * rows * columns, tower.patch_width):
        raise RequestError(
            f"{names[0]} has the shape {list(pixels.shape)}; expected [{frames * rows * columns}, {tower.patch_width}] "
            f"for a grid of {frames} × {rows} × {columns} patches"
        )
    return np.ascontiguousarray(pixels, dtype=np.float32), (frames, rows, columns), is_video


def _keys(image: Image) -> np.ndarray:
    """A number below zero for each token of an image, which no other image's token has: of 63 bits of a hash."""
    stream = hashlib.shake_256(image.digest).digest(8 * (image.end - image.start))
    return -1 - (np.frombuffer(stream, dtype="<i8") & np.int64(2**63 - 1))
