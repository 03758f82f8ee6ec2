"""A request's images, frames of videos and sounds: what each is for its tower, positions, and the prompt's cache keys.

Made once, when a request comes (`RequestMedia.of`); the scheduler asks where images are, the step runner what they are.
Free of torch.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.media.positions import Placed, positions_of
from mllm_compile.runtime.media.tower import MAX_FEATURES, Grid, Tower

_DIGEST_BYTES = 32


@dataclass(frozen=True, eq=False)
class Image:
    """One image of a prompt, a sound, or a frame of a video: frames do not attend to each other in a tower.

    Attributes:
        start, end: its tokens; each takes a feature, except breaks of the tower's images.
        digest: equal for images with the same features.
        grid: its patches.
        pixels: float32, [Tower.pixel_rows, Tower.pixel_width].
        is_sound: it is for the model's tower of sounds, beside one of images.
        sees_ahead: its tokens attend to each other in both directions.
    """

    start: int
    end: int
    digest: bytes
    grid: Grid
    pixels: np.ndarray
    is_sound: bool = False
    sees_ahead: bool = False


@dataclass(frozen=True, eq=False)
class RequestMedia:
    """The images of a request, N tokens of its prompt.

    Attributes:
        images: in order of their tokens.
        positions: [3, N] int64.
        delta: the position of a token behind the prompt, less its index.
        keys: [N] int64: token ids, where a token takes a feature a negative number of the image and the place in it.
        is_feature: [N] bool.
        sees_ahead: tokens of an image attend to each other in both directions, so that a chunk has all of it.
        has_sounds: some of the images are sounds, also of a model that takes nothing else.
    """

    images: tuple[Image, ...]
    positions: np.ndarray
    delta: int
    keys: np.ndarray
    is_feature: np.ndarray
    sees_ahead: bool = False
    has_sounds: bool = False

    @classmethod
    def of(
        cls,
        tower: Tower,
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
        keys, end, nouns = ids.copy(), 0, set[str]()
        images: list[Image] = []
        placed: list[Placed] = []
        for item in items:
            start, length = item[:2]
            noun = tower.of(item[3]).noun
            nouns.add(noun)
            if start < end or start + length > ids.size:
                raise RequestError(
                    f"{_a(noun)}'s tokens are {start} to {start + length - 1} of a prompt of {ids.size}, and what is "
                    f"before ends at {end}: expected images and sounds in order, within the prompt"
                )
            end = start + length
            own, grids = _images(tower, item, is_feature)
            images, placed = images + own, placed + grids
            for image in own:
                takes = image.start + np.flatnonzero(is_feature[image.start : image.end])
                expected[takes] = True
                keys[takes] = _keys(image.digest, takes.size)
        if not np.array_equal(expected, is_feature):
            raise RequestError(
                f"{int(np.count_nonzero(is_feature))} tokens take features, at other places than the {tower.noun}s' "
                f"{int(np.count_nonzero(expected))}"
            )
        stands = np.isin(ids, tower.placeholders)
        if not np.array_equal(expected, stands):
            raise RequestError(
                f"{int(np.count_nonzero(stands))} tokens of the prompt are placeholders ({tower.image_token_id} of "
                f"{tower.noun}s), but its {tower.noun}s have {int(np.count_nonzero(expected))} features. Give as many "
                f"{tower.noun}s as the prompt has places for, and let the model's processor expand them."
            )
        if tower.sees_ahead:
            check_apart([(image.start, image.end) for image in images if image.sees_ahead])
        positions, delta = positions_of(ids.size, placed if tower.axes > 1 else (), tower.merge)
        return cls(tuple(images), positions, delta, keys, expected, tower.sees_ahead, "sound" in nouns)

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.is_feature.size

    def images_within(self, start: int, end: int) -> Iterator[Image]:
        """The images that have tokens in [start, end)."""
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
    tower: Tower, item: tuple[int, int, bytes, Mapping[str, np.ndarray]], is_feature: np.ndarray
) -> tuple[list[Image], list[Placed]]:
    """An item's images, each frame or part of one, and where its grids are."""
    start, length, digest, tensors = item
    of_model, tower = tower, tower.of(tensors)
    is_sound, noun = tower is not of_model, tower.noun
    parts, interval = tower.read(tensors)
    if len(digest) != _DIGEST_BYTES:
        raise RequestError(f"{_a(noun)}'s digest has {len(digest)} bytes; expected {_DIGEST_BYTES}")
    places = start + np.flatnonzero(is_feature[start : start + length])
    features = [tower.num_features(grid) for _, grid in parts]
    if sum(features) != places.size:
        raise RequestError(f"{_a(noun)} has {sum(features)} features, and the prompt {places.size} tokens for it")
    if max(features) > MAX_FEATURES:
        raise RequestError(
            f"{_a(noun)} has {max(features)} features, and at most {MAX_FEATURES} are served. Make it smaller."
        )
    images = []
    for index, own in enumerate(np.split(places, np.cumsum(features)[:-1])):
        if own[-1] - own[0] + 1 != own.size and not tower.has_breaks:
            raise RequestError(f"the tokens of {_a(noun)}, or of a video's frame, must follow each other")
        own_digest = digest if len(parts) == 1 else hashlib.sha256(digest + index.to_bytes(4, "little")).digest()
        pixels, grid = parts[index]
        tower.inputs(grid)  # made here, on the caller's thread, and found when a step needs it
        place = int(own[0]), int(own[-1]) + 1
        images.append(Image(*place, own_digest, grid, pixels, is_sound, tower.sees_ahead))
    if is_sound:  # its tokens are placed as a text's
        return images, []
    grid = images[0].grid
    if len(images) == 1 or images[0].end != images[1].start:  # text between frames says when they are
        return images, [Placed(image.start, image.grid, interval) for image in images]
    return images, [Placed(images[0].start, (len(images), *grid[1:]), interval)]


def _a(noun: str) -> str:
    return f"an {noun}" if noun == "image" else f"a {noun}"


def check_apart(spans: Sequence[tuple[int, int]]) -> None:
    """Refuses images without text between: they would attend to each other, and be no image's own.

    Args:
        spans: first token and end of each, in order.
    """
    for (_, end), (start, _) in itertools.pairwise(spans):
        if end == start:
            raise RequestError(
                f"two images follow each other at token {end} with nothing between, which this model takes for "
                "one. Let the model's processor expand the prompt, or put text between."
            )


def _keys(digest: bytes, count: int) -> np.ndarray:
    """A number below zero for each token of an image, which no other image's token has: of 63 bits of a hash."""
    stream = hashlib.shake_256(digest).digest(8 * count)
    return -1 - (np.frombuffer(stream, dtype="<i8") & np.int64(2**63 - 1))
