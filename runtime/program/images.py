"""Runs a model's tower, and gives batches what comes of it.

Shape legend: T tokens, F features, W width of a feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.forward_batch import Block, ForwardBatch, MediaInputs
from mllm_compile.runtime.media.feature_pool import FeaturePool
from mllm_compile.runtime.media.tower import FEATURES_OF_A_RUN, MAX_FEATURES, Grid
from mllm_compile.runtime.media.tower_inputs import tower_inputs
from mllm_compile.runtime.program.executor import Segments
from mllm_compile.runtime.program.loaded import MediaExecutors


class ImageEncoder:
    """The tower of one model, on its device."""

    def __init__(self, media: MediaExecutors, dtype: torch.dtype, device: torch.device) -> None:
        self._facts, self._tower = media.facts, media.tower
        self._dtype, self._device = dtype, device

    def encode(self, pixel_values: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """The features [F, W] of images, by one run of the tower; launches without waiting for the device.

        Args:
            pixel_values: [rows, width] of all images, one after another, on the device, in the model's type.
            grids: each one's, as the tower counts it.
        """
        arrays, segments = tower_inputs(self._facts, grids)
        inputs: dict[str, Any] = {name: upload(array, self._device) for name, array in arrays.items()}
        inputs |= {name: Segments(upload(one.bounds, self._device), one.longest) for name, one in segments.items()}
        return torch.cat(self._tower.run_tower(inputs | {"pixel_values": pixel_values}), -1)

    def inputs_of(self, batch: ForwardBatch, pixel_values: torch.Tensor, grids: Sequence[Grid]) -> MediaInputs:
        """The inputs of a batch that brings its own images: their features, at its placeholders in order. Waits for the
        device.

        Raises:
            RequestError: there are not as many placeholders as features, or images see ahead, whose places in the batch
                only a `media` says.
        """
        facts, features = self._facts, self.encode(pixel_values, grids)
        if facts.sees_ahead:
            raise RequestError("images of this model see what is ahead in them. Give a batch `media`, with its blocks.")
        is_feature = (batch.input_ids == facts.image_token_id) | (batch.input_ids == facts.video_token_id)
        places = is_feature.nonzero()[:, 0]
        if len(places) != len(features):
            raise RequestError(
                f"the batch has {len(places)} placeholders (token {facts.image_token_id}), and its images have "
                f"{len(features)} features. Give one for each."
            )
        dense = features.new_zeros(len(is_feature), features.shape[1])
        return MediaInputs(dense.index_copy_(0, places, features), is_feature)

    # At the limits ----------------------------------------------------------------------------------------------------

    def run_largest(self, max_model_len: int) -> None:
        """Runs the tower on as many features as one run of it may have."""
        count = max(FEATURES_OF_A_RUN, min(max_model_len, MAX_FEATURES))
        grids = self._facts.largest(count)
        shape = sum(map(self._facts.pixel_rows, grids)), self._facts.pixel_width
        self.encode(torch.zeros(shape, dtype=self._dtype, device=self._device), grids)

    def fill(self, batch: ForwardBatch, pool: FeaturePool, first: int) -> None:
        """Makes all tokens of a batch take features; `first` are those of the first request."""
        index = torch.zeros_like(batch.input_ids)
        if self._facts.axes > 1:
            batch.mrope_positions = index.expand(self._facts.axes, -1).contiguous()
        blocks = (Block(0, 0, first, first),) if self._facts.sees_ahead else ()
        features = pool.rows.index_select(0, index)
        batch.media = MediaInputs(features, index == 0, blocks, self._facts.sees_ahead_in_windows)
