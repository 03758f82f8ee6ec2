"""Runs the tower of a model whose layers attend to images, and plans that attention.

Keys and values lie in pages of a row behind those of requests, as an encoder-decoder's (program/sources.py). To a
backend each token is a decode behind the states that it sees. These begin at some page of the row.

Shape legend: T tokens, N states that are written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mllm_compile.runtime.attention.base import AttentionBackend
from mllm_compile.runtime.attention.factory import make_attention_backend
from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode
from mllm_compile.runtime.media.tower import Grid
from mllm_compile.runtime.media.tower_inputs import tower_inputs
from mllm_compile.runtime.memory_pool import KVPool, ReqToTokenPool
from mllm_compile.runtime.program.loaded import ImageExecutors, LoadedModel
from mllm_compile.runtime.program.sources import Attending
from mllm_compile.runtime.runner_config import RunnerConfig


@dataclass(frozen=True, eq=False)
class SeenByTokens:
    """The states of images that a step's tokens see.

    Attributes:
        kinds: [T] int64, as sources/images.py numbers them.
        rows: [T] int64 of the table from each page, 0 of tokens that see none.
        lens: [T] int32 states, 1 of these.
    """

    kinds: np.ndarray
    rows: np.ndarray
    lens: np.ndarray


class ImageAttention:
    """A backend of its own for the attention to images."""

    def __init__(
        self, config: RunnerConfig, model: LoadedModel, req_to_token_pool: ReqToTokenPool, device: torch.device
    ) -> None:
        if model.images is None:
            raise ValueError("no layer of the model attends to images")
        attending = Attending(model.images.layers, model.layer_kernels)
        most = max(config.max_attended, config.runtime.max_num_batched_tokens)  # each token of a prompt is a row
        self._table = req_to_token_pool.from_each_page(config.runtime.page_size)
        self._backend: AttentionBackend = make_attention_backend(
            config, attending, self._table, device, most_decodes=most
        )
        self._device = device

    def plan(self, batch: ForwardBatch, seen: SeenByTokens) -> ForwardBatch:
        """Plans the attention of a batch's tokens to images."""
        lens = torch.from_numpy(seen.lens)
        of_images = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(lens),
            input_ids=batch.input_ids,
            req_pool_indices=upload(seen.rows, self._device),
            seq_lens=upload(seen.lens, self._device),
            seq_lens_cpu=lens,
            out_cache_loc=batch.out_cache_loc,
            positions=batch.positions,
            req_to_token_pool=self._table,
            token_to_kv_pool=batch.token_to_kv_pool,
            attn_backend=self._backend,
        )
        self._backend.init_forward_metadata(of_images)
        return of_images


class StatesOfImages:
    """The tower of one model, on its device."""

    def __init__(self, images: ImageExecutors, dtype: torch.dtype, device: torch.device) -> None:
        self._images, self._dtype, self._device = images, dtype, device

    def encode(self, pixels: np.ndarray, grid: Grid, states: np.ndarray, slots: np.ndarray, pool: KVPool) -> None:
        """Writes keys and values of one image; launches without waiting for the device.

        Args:
            states: [N] int64, of those that the tower makes.
            slots: [N] int64 of the pool, where each goes.
        """
        arrays, _ = tower_inputs(self._images.facts, [grid])
        inputs: dict[str, Any] = {name: upload(array, self._device) for name, array in arrays.items()}
        inputs["pixel_values"] = upload(pixels, self._device).to(self._dtype)
        outputs = self._images.tower.run_tower(inputs)
        places, rows = upload(slots, self._device), upload(states, self._device)
        for index, layer in enumerate(self._images.layers):
            keys, values = (one.index_select(0, rows) for one in outputs[2 * index : 2 * index + 2])
            pool.set_kv_buffer(layer.layer_id, places, keys, values)

    def encode_largest(self, pool: KVPool) -> None:
        """Encodes an image onto the dummy page."""
        facts: Any = self._images.facts
        (grid,) = facts.largest(1)
        pixels = np.zeros((facts.pixel_rows(grid), facts.pixel_width), dtype=np.float32)
        states = np.arange(facts.states_of_image)
        self.encode(pixels, grid, states, np.zeros_like(states), pool)
