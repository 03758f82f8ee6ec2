"""Attention over latents (MLA) by the program's own kernels (ops/latents/), for models of which all attention is so.

Both kernels read pages and lengths on the device. Decodes need nothing else of a batch, so a captured decode is
replayed without a plan; prompts are given a list of tiles, which the host makes.

Shape legend: T tokens, R requests, H query heads, D width of keys, C width of values, N splits, P slots, W pages of a
request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from mllm_compile.runtime.attention.base import AttentionBackend, AttentionInputs
from mllm_compile.runtime.attention.captured.decodes import check_capturable
from mllm_compile.runtime.attention.latent.tiles import PREFILL_TILE, num_decode_tiles, num_prefill_tiles
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.attention.metadata import CommonAttentionMetadata, split_decodes_and_prefills
from mllm_compile.runtime.attention.split.page_table import PageTable
from mllm_compile.runtime.attention.split.split_decode import DecodePiece
from mllm_compile.runtime.attention.split.splits import OF_LATENTS
from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.errors import ConfigError, UnsupportedModelError
from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode


@dataclass(frozen=True)
class LatentPieces:
    """The pieces of the program that attend over a layer's latents; arguments as those ops have them (ops/latents/)."""

    decode: DecodePiece
    prefill: DecodePiece


@dataclass(frozen=True)
class _Plan:
    """One batch.

    Attributes:
        seq_lens: [R] int32, of decodes first; kernels read it when they run.
        tiles: number of heads → [N, 4] int32 of prompts, on the device; empty: there are none.
    """

    num_decodes: int
    seq_lens: torch.Tensor
    tiles: Mapping[int, torch.Tensor] = field(default_factory=dict)


class LatentAttnBackend(AttentionBackend):
    """Attends over latents on a GPU."""

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        pieces: Mapping[str, LatentPieces],
        *,
        req_to_token: torch.Tensor,
        max_requests: int,
        page_size: int,
        dtype: torch.dtype,
    ) -> None:
        """
        Args:
            layers: the model's, all of latents.
            pieces: layer → the program's own kernels.
            req_to_token: [rows, columns] int32: the slot of each position.
            max_requests: most requests of a batch.
            dtype: the type of queries and cache.

        Raises:
            UnsupportedModelError: a layer has no kernels.
        """
        without = next((layer.name for layer in layers if layer.name not in pieces), None)
        if without is not None:
            raise UnsupportedModelError(
                f"attention layer {without} is over latents, and the runtime has no kernels for it. Compile the model "
                "again, with compile.disable_passes: [absorb_latents] to have keys and values of every head."
            )
        self._pieces = pieces
        self._table = PageTable(req_to_token, max_requests, page_size)
        kinds = {_kind(layer): layer for layer in layers}
        self._scratch = {kind: _Scratch(layer, max_requests, req_to_token.device) for kind, layer in kinds.items()}
        self._head_counts = {layer.num_heads for layer in layers}
        self._captured: dict[int, torch.Tensor] = {}  # rows → the lengths that the captured kernels read
        self._plan: _Plan | None = None
        self._load_kernels(layers, page_size, dtype)

    def _load_kernels(self, layers: Sequence[AttentionLayer], page_size: int, dtype: torch.dtype) -> None:
        """Attend over one token of the dummy page with each piece, which loads its kernels."""
        device = self._table.pages.device
        self._table.list(torch.zeros(1, dtype=torch.int64, device=device))
        one = torch.ones(1, dtype=torch.int32, device=device)
        tiles = torch.tensor([[0, 0, 1, 0]], dtype=torch.int32, device=device)
        plan = _Plan(1, one, dict.fromkeys(self._head_counts, tiles))
        for layer in {id(self._pieces[layer.name]): layer for layer in layers}.values():
            q = torch.zeros(1, layer.num_heads, layer.head_dim, dtype=dtype, device=device)
            latents = q.new_zeros(page_size, 1, layer.head_dim)
            out = q.new_empty(1, layer.num_heads, layer.v_head_dim)
            self._decode(plan, layer, q, latents, out)
            self._prefill(plan, layer, q, latents, out)

    # Planning ---------------------------------------------------------------------------------------------------------

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        common = CommonAttentionMetadata.of(batch)
        num_decodes, num_prefills, *_ = split_decodes_and_prefills(common)
        self._table.list(batch.req_pool_indices[: common.num_reqs])
        tiles = {}
        if num_prefills:
            device = self._table.pages.device
            tiles = {heads: upload(_prefill_tiles(common, num_decodes, heads), device) for heads in self._head_counts}
        self._plan = _Plan(num_decodes, batch.seq_lens[: common.num_reqs], tiles)

    # Running ----------------------------------------------------------------------------------------------------------

    def forward_decode(self, inputs: AttentionInputs) -> None:
        self.forward_extend(inputs)

    def forward_extend(self, inputs: AttentionInputs) -> None:
        plan = self._plan
        if plan is None:
            raise RuntimeError("call init_forward_metadata with the batch before forward")
        latents, _ = inputs.batch.token_to_kv_pool.get_kv_buffer(inputs.layer.layer_id)
        q, out, layer = inputs.q.contiguous(), inputs.out, inputs.layer
        if plan.num_decodes:
            self._decode(plan, layer, q[: plan.num_decodes], latents, out[: plan.num_decodes])
        if plan.tiles:
            self._prefill(plan, layer, q, latents, out)

    def _decode(
        self, plan: _Plan, layer: AttentionLayer, q: torch.Tensor, latents: torch.Tensor, out: torch.Tensor
    ) -> None:
        count = plan.num_decodes
        scratch = self._scratch[_kind(layer)].of(count)
        self._pieces[layer.name].decode([q, latents, self._table.pages[:count], plan.seq_lens[:count], out, *scratch])

    def _prefill(
        self, plan: _Plan, layer: AttentionLayer, q: torch.Tensor, latents: torch.Tensor, out: torch.Tensor
    ) -> None:
        pages = self._table.pages[: plan.seq_lens.shape[0]]
        self._pieces[layer.name].prefill([q, latents, pages, plan.seq_lens, plan.tiles[layer.num_heads], out])

    # CUDA graphs ------------------------------------------------------------------------------------------------------

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """0: the kernel passes such rows over."""
        return 0

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing is allocated: what kernels read is there.

        Raises:
            ConfigError: more tokens than rows.
        """
        if max_num_tokens != max_bs:
            raise ConfigError(f"only decodes of one token are captured: {max_bs} requests, {max_num_tokens} tokens")

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: ForwardMode,
    ) -> None:
        check_capturable(forward_mode, bs, num_tokens)
        self._table.list(req_pool_indices)
        self._captured[bs] = seq_lens
        self._plan = _Plan(bs, seq_lens)

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_sum: int,
        forward_mode: ForwardMode,
        seq_lens_cpu: torch.Tensor,
    ) -> None:
        check_capturable(forward_mode, bs, bs)
        if bs not in self._captured:
            raise RuntimeError(f"no batch of {bs} was captured; captured: {sorted(self._captured)}")
        self._table.list(req_pool_indices)
        captured = self._captured[bs]
        if seq_lens.data_ptr() != captured.data_ptr():
            captured.copy_(seq_lens)
        self._plan = _Plan(bs, captured)

    @property
    def page_table(self) -> torch.Tensor:
        return self._table.pages

    @property
    def mixed_obstacle(self) -> str:
        return "prompts over latents are given a list of their tiles by the host"


def _kind(layer: AttentionLayer) -> tuple[int, int]:
    """(H, C): layers of one kind share scratch."""
    return layer.num_heads, layer.v_head_dim


class _Scratch:
    """Scratch memory of the decodes of one kind of layers. Nothing of it lives from one call to the next."""

    def __init__(self, layer: AttentionLayer, max_requests: int, device: torch.device) -> None:
        self._num_heads = layer.num_heads
        self._tiles = num_decode_tiles(layer.num_heads)
        # The most blocks of a batch, of those whose keys are split, and of any.
        counts = [(count, self._splits_of(count)) for count in range(1, max_requests + 1)]
        num_split = max((count * splits for count, splits in counts if splits > 1), default=1)
        num_parts = max(count * splits for count, splits in counts)
        self._partial = torch.empty(num_split * layer.num_heads * layer.v_head_dim, dtype=torch.float32, device=device)
        self._tops = torch.empty(num_parts * layer.num_heads, dtype=torch.float32, device=device)
        self._totals = torch.empty_like(self._tops)

    def _splits_of(self, num_requests: int) -> int:
        return OF_LATENTS.of(num_requests * self._tiles)

    def of(self, num_requests: int) -> list[torch.Tensor]:
        """partial [X], tops and totals [R, N, H] of a batch; the number of requests alone decides N."""
        shape = (num_requests, self._splits_of(num_requests), self._num_heads)
        tops, totals = (scratch[: math.prod(shape)].view(shape) for scratch in (self._tops, self._totals))
        return [self._partial, tops, totals]


def _prefill_tiles(common: CommonAttentionMetadata, num_decodes: int, num_heads: int) -> np.ndarray:
    """[N, 4] int32 of the requests behind the decodes, as latent_prefill takes them: those with the most keys first, so
    that no long one begins when the others have ended."""
    starts = common.query_start_loc_cpu.numpy()
    requests = np.arange(num_decodes, common.num_reqs, dtype=np.int32)
    num_tokens = np.diff(starts)[num_decodes:]
    counts = num_prefill_tiles(num_tokens, num_heads)
    of_tile = np.repeat(np.arange(len(requests)), counts)
    first_tiles = np.cumsum(counts) - counts
    first_rows = (np.arange(len(of_tile)) - first_tiles[of_tile]) * PREFILL_TILE.rows
    tiles = np.stack((requests[of_tile], starts[requests][of_tile], num_tokens[of_tile], first_rows), axis=1)
    num_keys = common.num_computed_tokens_cpu.numpy()[requests][of_tile] + first_rows // num_heads
    return np.ascontiguousarray(tiles[np.argsort(-num_keys, kind="stable")], dtype=np.int32)
