"""The images of steps: a step's features, which are encoded when their first token comes and kept until the last one
has, and the positions of requests that have images.

Used by one thread, in the order of steps. W numbers of a feature, those for deeper layers included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.forward_batch import MediaInputs
from mllm_compile.runtime.media.request import Image
from mllm_compile.runtime.media.tower_inputs import tower_inputs
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.program.executor import Segments
from mllm_compile.runtime.schedule.request import Request, RequestStatus
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch


@dataclass(eq=False)
class _Kept:
    """An image's features [F, W], and the requests that have tokens of it to compute."""

    features: torch.Tensor
    holders: set[Request]


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
        for request, at, start, length in self._chunks(batch):
            positions[at : at + length] = request.media.text_positions(start, length)  # type: ignore[union-attr]
        return positions

    def inputs(self, batch: ScheduledBatch, positions: np.ndarray) -> MediaInputs | None:
        """The step's inputs beside tokens; None: none of its tokens takes a feature.

        Args:
            positions: [T], of all tokens that take none.
        """
        wanted = [chunk for chunk in self._chunks(batch) if _takes_features(*chunk)]
        self._drop(wanted)
        if not wanted:
            return None
        self._encode([(chunk[0], image) for chunk in wanted for image in _images_of(*chunk)])
        assert self._media is not None, "no other model's requests have images"
        width, device = self._media.facts.feature_width, self._runner.device
        features = torch.zeros(batch.num_tokens, width, dtype=self._runner.config.dtype, device=device)
        is_feature = np.zeros(batch.num_tokens, dtype=bool)
        axes = np.broadcast_to(positions, (3, positions.size)).copy()
        for request, at, start, length in wanted:
            media = request.media
            assert media is not None, "it takes features"
            axes[:, at : at + length] = media.all_positions(start, length)
            for image in _images_of(request, at, start, length):
                first, last = max(image.start, start), min(image.end, start + length)
                rows = slice(at + first - start, at + last - start)
                is_feature[rows] = True
                kept = self._kept[image.digest]
                features[rows] = kept.features[first - image.start : last - image.start]
                if last == image.end and not _needs_again(request, image):
                    kept.holders.discard(request)
        for digest in [digest for digest, kept in self._kept.items() if not kept.holders]:
            del self._kept[digest]
        return MediaInputs(features, upload(is_feature, device), upload(axes, device))

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

    def _drop(self, wanted: Sequence[tuple[Request, int, int, int]]) -> None:
        """Forgets features that were held for requests which have ended or lost their rows since."""
        for digest, kept in list(self._kept.items()):
            kept.holders = {one for one in kept.holders if one.status is RequestStatus.RUNNING}
            if not kept.holders and not any(image.digest == digest for chunk in wanted for image in _images_of(*chunk)):
                del self._kept[digest]

    def _encode(self, wanted: Sequence[tuple[Request, Image]]) -> None:
        """Holds the features of these images, and runs the tower for those that are not held yet."""
        new = {image.digest: image for _, image in wanted if image.digest not in self._kept}
        if new and self._media is not None:
            facts, device = self._media.facts, self._runner.device
            arrays, segments = tower_inputs(facts, [(image.pixels, image.grid) for image in new.values()])
            given = {name: upload(array, device) for name, array in arrays.items()}
            bounds = {name: Segments(upload(one.bounds, device), one.longest) for name, one in segments.items()}
            features = self._runner.run_tower(given | bounds)
            lengths = [image.end - image.start for image in new.values()]
            for image, own in zip(new.values(), features.split(lengths), strict=True):
                self._kept[image.digest] = _Kept(own.clone() if len(new) > 1 else own, set())
        for request, image in wanted:
            self._kept[image.digest].holders.add(request)


def _takes_features(request: Request, at: int, start: int, length: int) -> bool:
    return any(True for _ in _images_of(request, at, start, length))


def _images_of(request: Request, at: int, start: int, length: int) -> Iterator[Image]:
    """The images of which a chunk has tokens."""
    assert request.media is not None, "chunks of prompts with images"
    for image in request.media.images:
        if image.start < start + length and image.end > start:
            yield image


def _needs_again(request: Request, image: Image) -> bool:
    """True if the same image comes once more, behind this one."""
    assert request.media is not None, "it has this image"
    return any(other.digest == image.digest and other.start > image.start for other in request.media.images)
