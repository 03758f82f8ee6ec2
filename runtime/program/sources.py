"""Runs an encoder-decoder's encoder on sources, and plans the attention of its decoder to them.

Keys and values that a decoder attends to are made once a request. They are in pages of a row behind those of requests
(schedule/source_rows.py). To a backend each token is a decode of one token behind its whole source. So no order among
the tokens matters, and a step of decodes is one as it is.

Shape legend: T tokens, E states of sources, R requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from mllm_compile.runtime.attention.base import AttentionBackend
from mllm_compile.runtime.attention.capture import needed
from mllm_compile.runtime.attention.factory import make_attention_backend
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.attention.layer_kernels import LinkedKernels
from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode
from mllm_compile.runtime.memory_pool import KVPool, ReqToTokenPool
from mllm_compile.runtime.program.linked_steps import Segments
from mllm_compile.runtime.program.loaded import LoadedModel, SourceExecutors
from mllm_compile.runtime.runner_config import RunnerConfig
from mllm_compile.runtime.sources.facts import SourceFacts
from mllm_compile.runtime.sources.request import RequestSource


@dataclass(frozen=True)
class Attending:
    """The layers that attend to sources, as a backend takes a model's."""

    layers: Sequence[AttentionLayer]
    layer_kernels: Mapping[str, LinkedKernels]


# States that one run of the encoder makes of sounds: windows of 30 s have 1,500 each.
_STATES_OF_SOUNDS = 12000


def most_states(facts: SourceFacts, max_num_batched_tokens: int) -> int:
    """States that one run of the encoder makes at most, of several sources."""
    return max(max_num_batched_tokens, _STATES_OF_SOUNDS) if facts.is_sound else max_num_batched_tokens


class SourceAttention:
    """A backend of its own for the attention to sources: its plan is beside that of the decoder's own tokens.

    How long a source is stays the same as long as its request has its row. A captured decode reads both on the device:
    nothing of it is planned ahead of a replay.

    Attributes:
        first_row: of sources, in the table of slots.
        lens: [rows] int32, states of each row's source; 0 of the dummy row.
    """

    def __init__(
        self, config: RunnerConfig, model: LoadedModel, req_to_token_pool: ReqToTokenPool, device: torch.device
    ) -> None:
        if model.sources is None:
            raise ValueError("the model has no encoder")
        attending = Attending(model.sources.layers, model.layer_kernels)
        most = max(config.max_attended, config.runtime.max_num_batched_tokens)  # each token of a prompt is a row
        self._backend: AttentionBackend = make_attention_backend(
            config, attending, req_to_token_pool, device, most_decodes=most
        )
        self.first_row = req_to_token_pool.req_to_token.shape[0] // 2
        self.lens = torch.zeros(self.first_row, dtype=torch.int32, device=device)
        self._device = device
        self._places: _CapturedPlaces | None = None

    def enter(self, rows: np.ndarray, lens: np.ndarray) -> None:
        """Says how long the sources of requests in `rows` [R] int64 are, `lens` [R] int32, to captured decodes."""
        self.lens.index_copy_(0, upload(rows, self._device), upload(lens, self._device))

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
            rows = rows.index_select(0, upload(index.numpy(), self._device))
        of_sources = self._batch(batch, rows, upload(lens.numpy(), self._device), lens)
        self._backend.init_forward_metadata(of_sources)
        return of_sources

    # Captured decodes -------------------------------------------------------------------------------------------------

    @property
    def plans_replays(self) -> bool:
        """True if a replay of a captured decode needs `plan_replay` ahead of it."""
        return needed(self._backend.decodes).page_table is None

    def init_cuda_graph_state(self, most: int) -> None:
        """Allocates what captured decodes of up to `most` requests read."""
        needed(self._backend.decodes).init_cuda_graph_state(most, most)
        zeros = partial(torch.zeros, most, device=self._device)
        self._places = _CapturedPlaces(zeros(dtype=torch.int64), zeros(dtype=torch.int32))

    def plan_capture(self, batch: ForwardBatch) -> ForwardBatch:
        """Plans the attention of a captured decode of padding, `batch`, which will serve any as large."""
        size, decodes, places = batch.batch_size, needed(self._backend.decodes), needed(self._places)
        rows, lens = places.rows[:size], places.lens[:size]
        lens_cpu = torch.full((size,), decodes.get_cuda_graph_seq_len_fill_value(), dtype=torch.int32)
        decodes.init_forward_metadata_capture_cuda_graph(size, size, rows, lens, ForwardMode.DECODE)
        return self._batch(batch, rows, lens, lens_cpu)

    def begin_captured(self, requests: torch.Tensor) -> None:
        """Puts on the stream what such a capture begins with, where replays are not planned.

        Args:
            requests: [R] int64, the requests' rows at each replay; 0 of padding.
        """
        if not self.plans_replays:
            self._replay(requests, needed(self._places).lens[: len(requests)])

    def plan_replay(self, requests: torch.Tensor, lens_cpu: torch.Tensor | None) -> None:
        """Plans ahead of a replay, where that is needed.

        Args:
            requests: as begin_captured's.
            lens_cpu: [R' ≤ R] int32, states of their sources, padding left out; None: all are padding.
        """
        if not self.plans_replays:
            return
        filled = torch.ones(len(requests), dtype=torch.int32)
        if lens_cpu is not None:
            filled[: len(lens_cpu)] = lens_cpu
        self._replay(requests, filled)

    def _replay(self, requests: torch.Tensor, lens_cpu: torch.Tensor) -> None:
        size, places = len(requests), needed(self._places)
        rows, lens = places.rows[:size], places.lens[:size]
        torch.add(requests, self.first_row, out=rows)
        torch.index_select(self.lens, 0, requests, out=lens)
        decodes = needed(self._backend.decodes)
        decodes.init_forward_metadata_replay_cuda_graph(size, rows, lens, ForwardMode.DECODE, lens_cpu)

    def _batch(
        self, batch: ForwardBatch, rows: torch.Tensor, lens: torch.Tensor, lens_cpu: torch.Tensor
    ) -> ForwardBatch:
        """The tokens of `batch` as decodes behind their sources in `rows`."""
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(lens_cpu),
            input_ids=batch.input_ids,
            req_pool_indices=rows,
            seq_lens=lens,
            seq_lens_cpu=lens_cpu,
            out_cache_loc=batch.out_cache_loc,
            positions=batch.positions,
            req_to_token_pool=batch.req_to_token_pool,
            token_to_kv_pool=batch.token_to_kv_pool,
            attn_backend=self._backend,
        )


@dataclass(frozen=True)
class _CapturedPlaces:
    """The places that captured decodes read.

    Attributes:
        rows: [M] int64, of sources; lens: [M] int32, their states.
    """

    rows: torch.Tensor
    lens: torch.Tensor


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

    def encode_largest(self, most: int, pool: KVPool) -> None:
        """Encodes as many states as one run may have, onto the dummy page."""
        facts = self._sources.facts
        if facts.is_sound:
            window = np.zeros(facts.bins * facts.frames, dtype=np.float32)
            sources = [RequestSource.of_sound(window, facts.max_length)] * max(1, most // facts.max_length)
        else:
            sources = [RequestSource.of_text(np.zeros(min(most, facts.max_length), dtype=np.int64))]
            sources *= max(1, most // sources[0].length)
        self.encode(sources, np.zeros(sum(source.length for source in sources), dtype=np.int64), pool)

    def _inputs(self, sources: Sequence[RequestSource]) -> dict[str, Any]:
        lengths = np.array([source.length for source in sources], dtype=np.int64)
        bounds = np.concatenate(([0], np.cumsum(lengths)))
        segments = Segments(upload(bounds.astype(np.int32), self._device), int(lengths.max()))
        if self._sources.facts.is_sound:
            windows = np.stack([source.window for source in sources if source.window is not None])
            return {"pixel_values": upload(windows, self._device).to(self._dtype), "cu_seqlens": segments}
        ids = np.concatenate([source.ids for source in sources if source.ids is not None])
        starts, ends = (np.repeat(edges, lengths) for edges in (bounds[:-1], bounds[1:]))
        positions = np.arange(ids.size) - starts
        segments = replace(segments, rows=upload(np.stack((starts, ends)), self._device))
        return {
            "input_ids": upload(ids, self._device),
            "positions": upload(positions, self._device),
            "cu_seqlens": segments,
        }
