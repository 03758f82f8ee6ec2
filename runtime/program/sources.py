"""Runs an encoder-decoder's encoder on sources, and plans the attention of its decoder to them.

Keys and values that a decoder attends to are made once a request, and lie in pages of a row behind those of requests
(schedule/source_rows.py). To a backend each token is a decode of one token behind its whole source: no order among the
tokens matters, and a step of decodes is one as it is.

Shape legend: T tokens, E states of sources, R requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mllm_compile.runtime.attention.base import AttentionBackend
from mllm_compile.runtime.attention.factory import make_attention_backend
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.attention.layer_kernels import LinkedKernels
from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode
from mllm_compile.runtime.memory_pool import KVPool, ReqToTokenPool
from mllm_compile.runtime.program.executor import Segments
from mllm_compile.runtime.program.loaded import LoadedModel, SourceExecutors
from mllm_compile.runtime.runner_config import RunnerConfig
from mllm_compile.runtime.sources.request import RequestSource


@dataclass(frozen=True)
class _Attending:
    """The layers that attend to sources, as a backend takes a model's."""

    layers: Sequence[AttentionLayer]
    layer_kernels: Mapping[str, LinkedKernels]


class SourceAttention:
    """A backend of its own for the attention to sources: its plan is beside that of the decoder's own tokens.

    Attributes:
        first_row: of sources, in the table of slots.
    """

    def __init__(
        self, config: RunnerConfig, model: LoadedModel, req_to_token_pool: ReqToTokenPool, device: torch.device
    ) -> None:
        if model.sources is None:
            raise ValueError("the model has no encoder")
        attending = _Attending(model.sources.layers, model.layer_kernels)
        self._backend: AttentionBackend = make_attention_backend(config, attending, req_to_token_pool, device)
        self.first_row = req_to_token_pool.req_to_token.shape[0] // 2
        self._device = device

    def plan(self, batch: ForwardBatch) -> ForwardBatch:
        """Plans the attention of a batch's tokens to their sources; a batch without `source_lens_cpu` is of dummy
        rows."""
        lens, rows = batch.source_lens_cpu, batch.req_pool_indices + self.first_row
        if lens is None:
            lens = torch.ones(batch.batch_size, dtype=torch.int32)
        if not batch.forward_mode.is_decode_or_idle():
            new = batch.extend_seq_lens_cpu
            assert new is not None, "planned already, which needs it"
            lens = lens.repeat_interleave(new)
            index = torch.arange(batch.batch_size).repeat_interleave(new)
            rows = rows.index_select(0, index.to(self._device))
        of_sources = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(lens),
            input_ids=batch.input_ids,
            req_pool_indices=rows,
            seq_lens=lens.to(self._device),
            seq_lens_cpu=lens,
            out_cache_loc=batch.out_cache_loc,
            positions=batch.positions,
            req_to_token_pool=batch.req_to_token_pool,
            token_to_kv_pool=batch.token_to_kv_pool,
            attn_backend=self._backend,
        )
        self._backend.init_forward_metadata(of_sources)
        return of_sources


class SourceEncoder:
    """The encoder of one model, on its device."""

    def __init__(self, sources: SourceExecutors, dtype: torch.dtype, device: torch.device) -> None:
        self._sources, self._dtype, self._device = sources, dtype, device

    def encode(self, sources: Sequence[RequestSource], slots: np.ndarray, pool: KVPool) -> None:
        """Writes the keys and values of sources, by one run of the encoder; launches without waiting for the device.

        Args:
            slots: [E] int64 of the pool, where each source's states go, one source behind another.
        """
        outputs = self._sources.program.run_tower(self._inputs(sources))
        places = upload(slots, self._device)
        for index, layer in enumerate(self._sources.layers):
            pool.set_kv_buffer(layer.layer_id, places, *outputs[2 * index : 2 * index + 2])

    def _inputs(self, sources: Sequence[RequestSource]) -> dict[str, Any]:
        lengths = np.array([source.length for source in sources], dtype=np.int64)
        bounds = np.concatenate(([0], np.cumsum(lengths)))
        segments = Segments(upload(bounds.astype(np.int32), self._device), int(lengths.max()))
        if self._sources.facts.is_sound:
            windows = np.stack([source.window for source in sources if source.window is not None])
            return {"pixel_values": upload(windows, self._device).to(self._dtype), "cu_seqlens": segments}
        ids = np.concatenate([source.ids for source in sources if source.ids is not None])
        positions = np.arange(ids.size) - np.repeat(bounds[:-1], lengths)
        return {
            "input_ids": upload(ids, self._device),
            "positions": upload(positions, self._device),
            "cu_seqlens": segments,
        }
