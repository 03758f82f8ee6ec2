"""The images of steps: a step's features, which are encoded when their first token comes and kept until the last one
has, and the positions of requests that have images.

Used by one thread, in the order of steps. W numbers of a feature, those for deeper layers included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.forward_batch import Block, MediaInputs
from mllm_compile.runtime.media.request import Image, RequestMedia
from mllm_compile.runtime.media.tower_inputs import tower_inputs
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.program.executor import Segments
from mllm_compile.runtime.schedule.request import Request, RequestStatus
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch


@dataclass(eq=False)
class _Kept:
    """An image's features by its tokens [N, W], and the requests that have tokens of it to compute."""

    features: torch.Tensor
    holders: set[Request]


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

    def images(self) -> Iterator[Image]:
        """The images of which it has tokens."""
        return (image for image in self.media.images if image.start < self.end and image.end > self.start)


class MediaSteps:
    """See the module's header. A model without a tower has none."""

    def __init__(self, runner: ModelRunner, num_rows: int) -> None:
        self._runner, self._media = runner, runner.model.media
        self._deltas = np.zeros(num_rows, dtype=np.int32)  # by row: position less index, of tokens behind a prompt
        self._num_moved = 0  # rows whose delta is not 0
        self._kept: dict[bytes, _Kept] = {}  # by digest

    @property
    def num_kept(self) -> int:
        """Images whose features are held."""
        return len(self._kept)

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
        wanted = [chunk for chunk in self._chunks(batch) if _takes_features(chunk)]
        self._drop(wanted)
        if not wanted:
            return None
        self._encode([(chunk, image) for chunk in wanted for image in chunk.images()])
        assert self._media is not None, "no other model's requests have images"
        facts, device = self._media.facts, self._runner.device
        features = torch.zeros(batch.num_tokens, facts.feature_width, dtype=self._runner.config.dtype, device=device)
        is_feature = np.zeros(batch.num_tokens, dtype=bool)
        axes = np.broadcast_to(positions, (facts.axes, positions.size)).copy() if facts.axes > 1 else None
        blocks: list[Block] = []
        for chunk in wanted:
            request, media = chunk.request, chunk.media
            if axes is not None:
                axes[:, chunk.at : chunk.at + chunk.length] = media.all_positions(chunk.start, chunk.length)
            for image in chunk.images():
                first, last = max(image.start, chunk.start), min(image.end, chunk.end)
                rows = slice(chunk.at + first - chunk.start, chunk.at + last - chunk.start)
                is_feature[rows] = media.is_feature[first:last]
                kept = self._kept[image.digest]
                features[rows] = kept.features[first - image.start : last - image.start]
                if media.sees_ahead:
                    blocks.append(Block(chunk.place, rows.start, rows.stop, image.end))
                if last == image.end and not _needs_again(request, image):
                    kept.holders.discard(request)
        for digest in [digest for digest, kept in self._kept.items() if not kept.holders]:
            del self._kept[digest]
        placed = None if axes is None else upload(axes, device)
        return MediaInputs(features, upload(is_feature, device), placed, tuple(blocks))

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

    def _drop(self, wanted: Sequence[_Chunk]) -> None:
        """Forgets features that were held for requests which have ended or lost their rows since."""
        for digest, kept in list(self._kept.items()):
            kept.holders = {one for one in kept.holders if one.status is RequestStatus.RUNNING}
            if not kept.holders and not any(image.digest == digest for chunk in wanted for image in chunk.images()):
                del self._kept[digest]

    def _encode(self, wanted: Sequence[tuple[_Chunk, Image]]) -> None:
        """Holds the features of these images, and runs the tower for those that are not held yet."""
        new = {image.digest: (chunk.media, image) for chunk, image in wanted if image.digest not in self._kept}
        if new and self._media is not None:
            facts, device = self._media.facts, self._runner.device
            arrays, segments = tower_inputs(facts, [(image.pixels, image.grid) for _, image in new.values()])
            given = {name: upload(array, device) for name, array in arrays.items()}
            bounds = {name: Segments(upload(one.bounds, device), one.longest) for name, one in segments.items()}
            features = self._runner.run_tower(given | bounds)
            counts = [facts.num_features(image.grid) for _, image in new.values()]
            for (media, image), own in zip(new.values(), features.split(counts), strict=True):
                spread = _over_span(own, media.is_feature[image.start : image.end])
                self._kept[image.digest] = _Kept(spread.clone() if spread is own and len(new) > 1 else spread, set())
        for chunk, image in wanted:
            self._kept[image.digest].holders.add(chunk.request)


def _takes_features(chunk: _Chunk) -> bool:
    return any(True for _ in chunk.images())


def _over_span(features: torch.Tensor, takes: np.ndarray) -> torch.Tensor:
    """Features [F, W] where `takes` [N] says so, zeros for the tokens between."""
    if takes.all():
        return features
    rows = features.new_zeros(takes.size, features.shape[1])
    rows[upload(np.flatnonzero(takes), features.device)] = features
    return rows


def _needs_again(request: Request, image: Image) -> bool:
    """True if the same image comes once more, behind this one."""
    assert request.media is not None, "it has this image"
    return any(other.digest == image.digest and other.start > image.start for other in request.media.images)
