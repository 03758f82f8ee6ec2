"""The images of steps: a step's features, for which the tower runs where the pool lacks them, and the positions of
requests that have images.

Used by one thread, in the order of steps. W numbers of a feature, those for deeper layers included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from mllm_compile.runtime.device.upload import upload, upload_rows
from mllm_compile.runtime.forward_batch import Block, MediaInputs
from mllm_compile.runtime.media.feature_pool import FeaturePool, Key
from mllm_compile.runtime.media.request import Image, RequestMedia
from mllm_compile.runtime.media.tower import FEATURES_OF_A_RUN, Tower
from mllm_compile.runtime.media.tower_inputs import tower_inputs
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.program.executor import Segments
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch


class _Chunk(NamedTuple):
    """The tokens of a prompt with images in a step: the request, its place in the batch, its first row of T, its first
    token and their number."""

    request: Request
    media: RequestMedia
    place: int
    at: int
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    def images(self) -> list[Image]:
        """The images of which it has tokens."""
        return list(self.media.images_within(self.start, self.end))

    def key(self, image: Image) -> Key:
        """The pool's name of an image. Those of requests that share no KV share no features: their times would tell."""
        return image.digest, self.request.cache_salt


class MediaSteps:
    """See the module's header. A model without a tower has none.

    Attributes:
        num_encoded: images that the tower has run on.
    """

    def __init__(self, runner: ModelRunner, num_rows: int) -> None:
        self._runner, self._media = runner, runner.model.media
        self._deltas = np.zeros(num_rows, dtype=np.int32)  # by row: position less index, of tokens behind a prompt
        self._num_moved = 0  # rows whose delta is not 0
        self.num_encoded = 0

    def admit(self, requests: Sequence[Request]) -> None:
        """Notes what requests have that got their rows in this step."""
        for request in requests:
            self._deltas[request.row] = 0 if request.media is None else request.media.delta
        if requests:
            self._num_moved = int(np.count_nonzero(self._deltas))

    def deltas(self, rows: np.ndarray) -> np.ndarray | None:
        """[R] what positions of these rows' decodes are beyond their index; None: nothing."""
        return self._deltas[rows] if self._num_moved else None

    def positions(self, batch: ScheduledBatch, index: np.ndarray) -> np.ndarray:
        """The positions [T] of a step's tokens, given their index within their requests."""
        if not self._num_moved:
            return index
        positions = index + np.repeat(self._deltas[batch.rows], batch.num_new)
        for chunk in self._chunks(batch):
            own = chunk.media.text_positions(chunk.start, chunk.length)
            positions[chunk.at : chunk.at + chunk.length] = own
        return positions

    def inputs(self, batch: ScheduledBatch, positions: np.ndarray) -> MediaInputs | None:
        """The step's inputs beside tokens; None: none of its tokens takes a feature.

        Args:
            positions: [T], of all tokens that take none.
        """
        wanted = [(chunk, images) for chunk in self._chunks(batch) if (images := chunk.images())]
        pool = self._runner.feature_pool
        if not wanted or pool is None or self._media is None:
            return None
        self._encode(pool, {chunk.key(image): image for chunk, images in wanted for image in images})
        rows = np.zeros(batch.num_tokens, dtype=np.int64)  # of the pool
        axes = np.broadcast_to(positions, (self._media.facts.axes, positions.size)).copy()
        blocks: list[Block] = []
        for chunk, images in wanted:
            own_axes = chunk.media.all_positions(chunk.start, chunk.length)
            axes[:, chunk.at : chunk.at + chunk.length] = own_axes[: len(axes)]
            for image in images:
                own = pool.find(chunk.key(image))
                assert own is not None, "it was encoded for this step"
                first, last = max(image.start, chunk.start), min(image.end, chunk.end)
                of_step = slice(chunk.at + first - chunk.start, chunk.at + last - chunk.start)
                of_image = np.zeros(image.end - image.start, dtype=np.int64)
                of_image[chunk.media.is_feature[image.start : image.end]] = own
                rows[of_step] = of_image[first - image.start : last - image.start]
                if chunk.media.sees_ahead:
                    blocks.append(Block(chunk.place, of_step.start, of_step.stop, image.end))
        device = self._runner.device
        index, placed = upload(rows, device), upload(axes, device) if len(axes) > 1 else None
        return MediaInputs(pool.rows.index_select(0, index), index > 0, placed, tuple(blocks))

    def _chunks(self, batch: ScheduledBatch) -> Iterator[_Chunk]:
        """Each prompt with images."""
        if self._media is None:
            return
        at = batch.num_decodes
        for place in range(batch.num_decodes, batch.num_requests):
            request, length = batch.requests[place], int(batch.num_new[place])
            if request.media is not None:
                yield _Chunk(request, request.media, place, at, int(batch.prefix_lens[place]), length)
            at += length

    def _encode(self, pool: FeaturePool, needed: Mapping[Key, Image]) -> None:
        """Brings the features of a step's images into the pool: runs the tower for those that are not there."""
        facts = self._runner.model.media.facts  # type: ignore[union-attr]
        missing = [(key, image) for key, image in needed.items() if pool.find(key) is None]
        for run in _runs(facts, missing):
            placed: list[np.ndarray] = []
            try:
                for key, image in run:
                    placed.append(pool.place(key, facts.num_features(image.grid), needed))
                features = self._features_of([image for _, image in run])
                pool.rows.index_copy_(0, upload(np.concatenate(placed), self._runner.device), features)
            except BaseException:  # what was not written is not there
                for key, _ in run[: len(placed)]:
                    pool.forget(key)
                raise
            self.num_encoded += len(run)

    def _features_of(self, images: Sequence[Image]) -> torch.Tensor:
        """The features [F, W] of images, by one run of the tower."""
        assert self._media is not None, "no other model's requests have images"
        facts, device = self._media.facts, self._runner.device
        arrays, segments = tower_inputs(facts, [image.grid for image in images])
        inputs: dict[str, Any] = {name: upload(array, device) for name, array in arrays.items()}
        for name, one in segments.items():
            inputs[name] = Segments(upload(one.bounds, device), one.longest)
        inputs["pixel_values"] = upload_rows([image.pixels for image in images], self._runner.config.dtype, device)
        return self._runner.run_tower(inputs)


def _runs(facts: Tower, images: Sequence[tuple[Key, Image]]) -> Iterator[list[tuple[Key, Image]]]:
    """The images of each run of the tower, in order."""
    run: list[tuple[Key, Image]] = []
    features = 0
    for key, image in images:
        own = facts.num_features(image.grid)
        if run and features + own > FEATURES_OF_A_RUN:
            yield run
            run, features = [], 0
        run.append((key, image))
        features += own
    if run:
        yield run
