"""The images of steps: a step's features, for which the tower runs where the pool lacks them, and the positions of
requests that have images.

Used by one thread, in the order of steps. W numbers of a feature, those for deeper layers included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mllm_compile.runtime.device.upload import upload, upload_rows
from mllm_compile.runtime.forward_batch import MediaInputs
from mllm_compile.runtime.media.feature_pool import FeaturePool, Key
from mllm_compile.runtime.media.grids import FEATURES_OF_A_RUN
from mllm_compile.runtime.media.request import Image
from mllm_compile.runtime.media.tower_inputs import tower_inputs
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.program.executor import Segments
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch


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
        for request, at, start, length in self._chunks(batch):
            positions[at : at + length] = request.media.text_positions(start, length)  # type: ignore[union-attr]
        return positions

    def inputs(self, batch: ScheduledBatch, positions: np.ndarray) -> MediaInputs | None:
        """The step's inputs beside tokens; None: none of its tokens takes a feature.

        Args:
            positions: [T], of all tokens that take none.
        """
        wanted = [(*chunk, images) for chunk in self._chunks(batch) if (images := _images_of(*chunk))]
        pool = self._runner.feature_pool
        if not wanted or pool is None:
            return None
        self._encode(pool, {_key(chunk[0], image): image for chunk in wanted for image in chunk[-1]})
        rows = np.zeros(batch.num_tokens, dtype=np.int64)  # of the pool
        axes = np.broadcast_to(positions, (3, positions.size)).copy()
        for request, at, start, length, images in wanted:
            axes[:, at : at + length] = request.media.all_positions(start, length)  # type: ignore[union-attr]
            for image in images:
                own = pool.find(_key(request, image))
                assert own is not None, "it was encoded for this step"
                first, last = max(image.start, start), min(image.end, start + length)
                rows[at + first - start : at + last - start] = own[first - image.start : last - image.start]
        index = upload(rows, self._runner.device)
        return MediaInputs(pool.rows.index_select(0, index), index > 0, upload(axes, self._runner.device))

    def _chunks(self, batch: ScheduledBatch) -> Iterator[tuple[Request, int, int, int]]:
        """Each prompt with images: the request, its first row of T, its first token and their number."""
        if self._media is None:
            return
        at = batch.num_decodes
        for place in range(batch.num_decodes, batch.num_requests):
            request, length = batch.requests[place], int(batch.num_new[place])
            if request.media is not None:
                yield request, at, int(batch.prefix_lens[place]), length
            at += length

    def _encode(self, pool: FeaturePool, needed: Mapping[Key, Image]) -> None:
        """Brings the features of a step's images into the pool: runs the tower for those that are not there."""
        missing = [(key, image) for key, image in needed.items() if pool.find(key) is None]
        for run in _runs(missing):
            placed: list[np.ndarray] = []
            try:
                for key, image in run:
                    placed.append(pool.place(key, image.end - image.start, needed))
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
        width = facts.merge**2 * facts.patch_width
        pixels = [image.pixels.reshape(-1, width) for image in images]
        inputs["pixel_values"] = upload_rows(pixels, self._runner.config.dtype, device)
        return self._runner.run_tower(inputs)


def _images_of(request: Request, at: int, start: int, length: int) -> list[Image]:
    """The images of which a chunk has tokens."""
    assert request.media is not None, "chunks of prompts with images"
    return list(request.media.images_within(start, start + length))


def _key(request: Request, image: Image) -> Key:
    """The pool's name of an image. Those of requests that share no KV share no features: their times would tell."""
    return image.digest, request.cache_salt


def _runs(images: Sequence[tuple[Key, Image]]) -> Iterator[list[tuple[Key, Image]]]:
    """The images of each run of the tower, in order."""
    run: list[tuple[Key, Image]] = []
    features = 0
    for key, image in images:
        own = image.end - image.start
        if run and features + own > FEATURES_OF_A_RUN:
            yield run
            run, features = [], 0
        run.append((key, image))
        features += own
    if run:
        yield run
