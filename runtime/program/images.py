"""Runs a model's tower, and gives batches its features.

Shape legend: T tokens, F features, W width of a feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mllm_compile.runtime.attention.metadata import CommonAttentionMetadata
from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.forward_batch import Block, ForwardBatch, MediaInputs
from mllm_compile.runtime.media.batch_images import BatchImage, find_images, place_tokens
from mllm_compile.runtime.media.feature_pool import FeaturePool
from mllm_compile.runtime.media.tower import FEATURES_OF_A_RUN, MAX_FEATURES, Grid
from mllm_compile.runtime.media.tower_inputs import tower_inputs
from mllm_compile.runtime.program.linked_steps import Segments
from mllm_compile.runtime.program.loaded import MediaExecutors


class ImageEncoder:
    """The towers of one model, on its device."""

    def __init__(self, media: MediaExecutors, dtype: torch.dtype, device: torch.device) -> None:
        self._facts, self._tower, self._sound_tower = media.facts, media.tower, media.sound_tower
        self._dtype, self._device = dtype, device

    def encode(self, pixel_values: torch.Tensor, grids: Sequence[Grid], of_sounds: bool = False) -> torch.Tensor:
        """The features [F, W] of images, by one run of the tower; launches without waiting for the device.

        Args:
            pixel_values: [rows, width] of all images, one after another, on the device, in the model's type.
            grids: each one's, as the tower counts it.
            of_sounds: they are for the tower of sounds that a model has beside one of images.
        """
        facts, tower = self._facts.one(of_sounds), self._tower
        if of_sounds:
            assert self._sound_tower is not None, "a request's media say which tower they are for"
            tower = self._sound_tower
        arrays, segments = tower_inputs(facts, grids)
        inputs: dict[str, Any] = {name: upload(array, self._device) for name, array in arrays.items()}
        inputs |= {name: Segments(upload(one.bounds, self._device), one.longest) for name, one in segments.items()}
        features = torch.cat(tower.run_tower(inputs | {"pixel_values": pixel_values}), -1)
        lacking = self._facts.feature_width - features.shape[1]  # of a sound: numbers for deeper layers
        return torch.nn.functional.pad(features, (0, lacking)) if lacking else features

    def take_images(self, batch: ForwardBatch, pixel_values: torch.Tensor, grids: Sequence[Grid]) -> None:
        """Runs the tower on the images that a batch brings, whose placeholders are in order.

        Sets the batch's `media`; where the model has axes and the batch no `mrope_positions`, these and
        `mrope_position_deltas` too. Waits for the device.

        Raises:
            RequestError: placeholders and images do not fit each other, or where tokens are is not known: of videos,
                and of a prompt in parts.
        """
        facts, common = self._facts, CommonAttentionMetadata.of(batch)
        ids, starts = batch.input_ids.cpu().numpy(), common.query_start_loc_cpu.numpy()
        prefix_lens = common.num_computed_tokens_cpu.numpy()
        images = find_images(facts, ids, starts, grids)
        if facts.axes > 1 and batch.mrope_positions is None:
            if facts.video_token_id != facts.image_token_id and (ids == facts.video_token_id).any():
                raise RequestError("a video's frames have times. Give the batch `mrope_positions`.")
            axes, deltas = place_tokens(facts, batch.positions.cpu().numpy(), starts, prefix_lens, images)
            batch.mrope_positions = upload(axes, self._device)
            batch.mrope_position_deltas = upload(deltas, self._device)
        features = self.encode(pixel_values.to(self._device, self._dtype), grids)
        places = upload(np.concatenate([image.places for image in images]), self._device)
        dense = features.new_zeros(ids.size, features.shape[1]).index_copy_(0, places, features)
        is_feature = torch.zeros(ids.size, dtype=torch.bool, device=self._device).index_fill_(0, places, True)
        blocks = [_block(image, starts, prefix_lens) for image in images] if facts.sees_ahead else []
        batch.media = MediaInputs(dense, is_feature, tuple(blocks), facts.sees_ahead_in_windows)

    # At the limits ----------------------------------------------------------------------------------------------------

    def run_largest(self, max_model_len: int) -> None:
        """Runs each tower on as many features as one run of it may have."""
        count = max(FEATURES_OF_A_RUN, min(max_model_len, MAX_FEATURES))
        for of_sounds in (False, True)[: 1 if self._sound_tower is None else 2]:
            facts = self._facts.one(of_sounds)
            grids = facts.largest(count)
            shape = sum(map(facts.pixel_rows, grids)), facts.pixel_width
            self.encode(torch.zeros(shape, dtype=self._dtype, device=self._device), grids, of_sounds)

    def fill(self, batch: ForwardBatch, pool: FeaturePool, first: int) -> None:
        """Makes all tokens of a batch take features; `first` are the first request's."""
        index = torch.zeros_like(batch.input_ids)
        if self._facts.axes > 1:
            batch.mrope_positions = index.expand(self._facts.axes, -1).contiguous()
        blocks = (Block(0, 0, first, first),) if self._facts.sees_ahead else ()
        features = pool.rows.index_select(0, index)
        batch.media = MediaInputs(features, index == 0, blocks, self._facts.sees_ahead_in_windows)


def _block(image: BatchImage, query_start_loc: np.ndarray, prefix_lens: np.ndarray) -> Block:
    """The tokens of an image that attend to each other in both directions."""
    request = image.request
    return Block(request, image.start, image.end, int(prefix_lens[request] + image.end - query_start_loc[request]))
