"""The images that a batch brings by itself: which tokens take their features, and the positions that they make.

An engine's steps know this of a request since it came (request.py). Free of torch.

Shape legend: T tokens of the batch, R requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.media.positions import Placed, positions_of
from mllm_compile.runtime.media.request import check_apart
from mllm_compile.runtime.media.tower import Grid, Tower


class BatchImage(NamedTuple):
    """An image of a batch.

    Attributes:
        request: the place of its request in the batch.
        places: rows of T that take its features, in order.
        grid: its patches.
    """

    request: int
    places: np.ndarray
    grid: Grid

    @property
    def start(self) -> int:
        return int(self.places[0])

    @property
    def end(self) -> int:
        return int(self.places[-1]) + 1


def find_images(
    tower: Tower, token_ids: np.ndarray, query_start_loc: np.ndarray, grids: Sequence[Grid]
) -> list[BatchImage]:
    """The images of a batch, by its placeholders in order.

    Args:
        token_ids: [T].
        query_start_loc: [R + 1]: tokens of request i are [i] … [i + 1].

    Raises:
        RequestError: there are not as many placeholders as features, or an image's placeholders are in two requests.
    """
    places = np.flatnonzero((token_ids == tower.image_token_id) | (token_ids == tower.video_token_id))
    counts = [tower.num_features(grid) for grid in grids]
    if sum(counts) != places.size:
        raise RequestError(
            f"the batch has {places.size} placeholders (token {tower.image_token_id}), and its images have "
            f"{sum(counts)} features. Give one for each."
        )
    found = []
    for grid, own in zip(grids, np.split(places, np.cumsum(counts[:-1])) if counts else (), strict=True):
        first, last = np.searchsorted(query_start_loc, own[[0, -1]], side="right") - 1
        if first != last:
            raise RequestError(
                f"the image at token {own[0]} has placeholders in two requests. Bring a request's images whole."
            )
        found.append(BatchImage(int(first), own, grid))
    if tower.sees_ahead:
        check_apart([(image.start, image.end) for image in found])
    return found


def place_tokens(
    tower: Tower,
    positions: np.ndarray,
    query_start_loc: np.ndarray,
    prefix_lens: np.ndarray,
    images: Sequence[BatchImage],
) -> tuple[np.ndarray, np.ndarray]:
    """Positions on the axes of the tower, and the offset of later tokens' positions from their index.

    Args:
        positions: [T] of the batch as a text.
        prefix_lens: [R] tokens of each request that the cache has.

    Returns:
        [axes, T] int64, and [R] int64, mostly negative.

    Raises:
        RequestError: a request with images has tokens in the cache, whose images are not known here.
    """
    placed = np.broadcast_to(positions, (tower.axes, positions.size)).copy()
    deltas = np.zeros(prefix_lens.size, dtype=np.int64)
    for request, own in itertools.groupby(images, key=lambda image: image.request):
        if prefix_lens[request]:
            raise RequestError(
                f"request {request} brings images behind {prefix_lens[request]} tokens in the cache. Bring its prompt "
                "whole, or give the batch `mrope_positions`."
            )
        start, end = query_start_loc[request : request + 2].tolist()
        grids = [Placed(image.start - start, image.grid) for image in own]
        axes, deltas[request] = positions_of(end - start, grids, tower.merge)
        placed[:, start:end] = axes[: tower.axes]
    return placed, deltas
