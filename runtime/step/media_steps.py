"""The images of steps: a step's features (the tower runs if the pool lacks them), and the positions of requests that
have images.

Used by one thread, in the order of steps. W numbers of a feature, those for deeper layers included.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from mllm_compile.runtime.device.upload import RowUploads, upload
from mllm_compile.runtime.forward_batch import Block, MediaInputs
from mllm_compile.runtime.media.feature_pool import FeaturePool, Key
from mllm_compile.runtime.media.request import Image, RequestMedia
from mllm_compile.runtime.media.step_plan import MediaPlan
from mllm_compile.runtime.media.tower import FEATURES_OF_A_RUN, Tower
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch


class _Chunk(NamedTuple):
    """The tokens of a prompt with images in a step.

    It has the request, its place in the batch, its first row of T, its first token and their number.
    """

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
        """The images of its tokens."""
        return list(self.media.images_within(self.start, self.end))

    def key(self, image: Image) -> Key:
        """The pool's name of an image. Those of requests that share no KV share no features: their times would tell."""
        return image.digest, self.request.cache_salt


class MediaSteps:
    """See the module's header. A model without a tower has none.

    In the deterministic mode the tower runs on one image at a time, and every step takes features, or zeros. So a
    request's numbers depend on no other request.

    Attributes:
        num_encoded: images that the tower has run on.
    """

    def __init__(self, runner: ModelRunner, num_rows: int) -> None:
        self._runner, self._media = runner, runner.model.media
        self._uploads = RowUploads(runner.device)
        self._features_of_a_run = 1 if runner.config.runtime.deterministic else FEATURES_OF_A_RUN
        self._deltas = np.zeros(num_rows, dtype=np.int32)  # by row: position less index, of tokens behind a prompt
        self._has_images = np.zeros(num_rows, dtype=bool)  # by row
        self.num_encoded = 0
        self._to_encode: list[list[tuple[Key, Image]]] = []  # of the step that is being launched, by runs of the tower

    def admit(self, requests: Sequence[Request]) -> None:
        """Notes what requests have that got their rows in this step."""
        for request in requests:
            self._deltas[request.row] = 0 if request.media is None else request.media.delta
            self._has_images[request.row] = request.media is not None

    def has_images(self, batch: ScheduledBatch) -> bool:
        """True if a request of the step has images."""
        return self._media is not None and bool(self._has_images[batch.rows].any())

    def plan(self, batch: ScheduledBatch, index: np.ndarray) -> MediaPlan | None:
        """The step's positions and features; None: no request of it has images.

        Args:
            index: [T] of the step's tokens within their requests, and zeros for rows of padding.
        """
        if self._media is None:
            return None
        self._forget_unwritten()
        if not self.has_images(batch):
            return None
        deltas = self._deltas[batch.rows]
        positions = index.copy()
        positions[: batch.num_tokens] += np.repeat(deltas, batch.num_new)
        chunks = list(self._chunks(batch))
        for chunk in chunks:
            own = chunk.media.text_positions(chunk.start, chunk.length)
            positions[chunk.at : chunk.at + chunk.length] = own
        wanted = [(chunk, images) for chunk in chunks if (images := chunk.images())]
        if not wanted:
            return MediaPlan(positions, deltas)
        runs = self._place({chunk.key(image): image for chunk, images in wanted for image in images})
        rows = np.zeros(index.size, dtype=np.int64)
        axes = np.broadcast_to(positions, (self._facts.axes, positions.size)).copy()
        blocks: list[tuple[int, ...]] = []
        for chunk, images in wanted:
            own_axes = chunk.media.all_positions(chunk.start, chunk.length)
            axes[:, chunk.at : chunk.at + chunk.length] = own_axes[: len(axes)]
            for image in images:
                of_pool = self._pool.find(chunk.key(image))
                assert of_pool is not None, "it was placed for this step"
                first, last = max(image.start, chunk.start), min(image.end, chunk.end)
                of_step = slice(chunk.at + first - chunk.start, chunk.at + last - chunk.start)
                of_image = np.zeros(image.end - image.start, dtype=np.int64)
                of_image[chunk.media.is_feature[image.start : image.end]] = of_pool
                rows[of_step] = of_image[first - image.start : last - image.start]
                if image.sees_ahead:
                    blocks.append(Block(chunk.place, of_step.start, of_step.stop, image.end))
        return MediaPlan(positions, deltas, rows, axes, runs, np.array(blocks, dtype=np.int64).reshape(-1, 4))

    def inputs(self, plan: MediaPlan) -> tuple[MediaInputs, torch.Tensor | None]:
        """The inputs of a step with tokens that take features (the tower runs if they are missing); and positions
        [axes, T] if the model has axes.

        On a rank that follows they come from rank 0, which alone has the images."""
        pool, device = self._pool, self._runner.device
        images = self._to_encode or [[] for _ in plan.runs]
        for rows, run in zip(plan.runs, images, strict=True):
            if run:
                features = self._features_of([image for _, image in run])
            else:
                features = torch.empty(rows.size, pool.rows.shape[1], dtype=pool.rows.dtype, device=device)
            self._runner.broadcast(features)
            pool.rows.index_copy_(0, upload(rows, device), features)
            self.num_encoded += len(run)
        self._to_encode = []
        index, axes = upload(plan.rows, device), plan.axes
        placed = upload(axes, device) if len(axes) > 1 else None
        blocks = tuple(Block(*block) for block in plan.blocks.tolist())
        features = pool.rows.index_select(0, index)
        return MediaInputs(features, index > 0, blocks, self._facts.sees_ahead_in_windows), placed

    def no_features(self, positions: torch.Tensor) -> tuple[MediaInputs, torch.Tensor | None]:
        """The inputs of a step without features, as `inputs` gives them; its tokens are at `positions` [T]."""
        index = torch.zeros_like(positions)
        placed = positions.expand(self._facts.axes, -1).contiguous() if self._facts.axes > 1 else None
        return MediaInputs(self._pool.rows.index_select(0, index), index > 0), placed

    @property
    def _pool(self) -> FeaturePool:
        pool = self._runner.feature_pool
        assert pool is not None, "no other model's requests have images"
        return pool

    @property
    def _facts(self) -> Tower:
        assert self._media is not None, "no other model's requests have images"
        return self._media.facts

    def _chunks(self, batch: ScheduledBatch) -> Iterator[_Chunk]:
        """Each prompt with images."""
        if self._media is None:
            return
        at = batch.num_decode_tokens
        for place in range(batch.num_decodes, batch.num_requests):
            request, length = batch.requests[place], int(batch.num_new[place])
            if request.media is not None:
                yield _Chunk(request, request.media, place, at, int(batch.prefix_lens[place]), length)
            at += length

    def _place(self, needed: Mapping[Key, Image]) -> tuple[np.ndarray, ...]:
        """Gives rows of the pool to a step's missing images; returns the images of each run of the tower."""
        pool, facts = self._pool, self._facts
        missing = [(key, image) for key, image in needed.items() if pool.find(key) is None]
        for run in _runs(facts, missing, self._features_of_a_run):
            self._to_encode.append(run)
        return tuple(
            np.concatenate([pool.place(key, _features(facts, image), needed) for key, image in run])
            for run in self._to_encode
        )

    def _forget_unwritten(self) -> None:
        """Gives back the rows of images of a step that failed before their features were written."""
        for key, _ in itertools.chain.from_iterable(self._to_encode):
            if self._pool.find(key) is not None:
                self._pool.forget(key)
        self._to_encode = []

    def _features_of(self, images: Sequence[Image]) -> torch.Tensor:
        """The features [F, W] of images, by one run of the tower."""
        pixels = self._uploads([image.pixels for image in images], self._runner.config.dtype)
        grids = [image.grid for image in images]
        return self._runner.image_encoder().encode(pixels, grids, of_sounds=images[0].is_sound)


def _runs(facts: Tower, images: Sequence[tuple[Key, Image]], most: int) -> Iterator[list[tuple[Key, Image]]]:
    """The images of each run of a tower, in order, which have together at most so many features, or are one. What
    fills a sound up counts: the tower runs on it."""
    run: list[tuple[Key, Image]] = []
    counted = 0
    for key, image in images:
        own = facts.one(image.is_sound).num_counted(image.grid)
        if run and (counted + own > most or image.is_sound != run[0][1].is_sound):
            yield run
            run, counted = [], 0
        run.append((key, image))
        counted += own
    if run:
        yield run


def _features(facts: Tower, image: Image) -> int:
    return facts.one(image.is_sound).num_features(image.grid)
