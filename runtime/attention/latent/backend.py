"""Attention over latents (MLA) by the program's own kernels, for models that attend in no other way.

The kernels (ops/attention/latent.py) read pages and lengths on the device. Decodes need nothing else of a batch, so a
captured decode is replayed without a plan. Prompts are given a list of tiles, which the host makes.

A layer may bring its up-projection (passes/expand_latents.py), which is applied here. Over latents it is applied to
queries and outputs. Some prompts are faster with expanded latents (choice.py, expanded.py): there it is applied to the
latents.

Shape legend: T tokens, R requests, H query heads, D width of keys, C width of values, N splits, P slots, W pages of a
request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from mllm_compile.runtime.attention.base import AttentionBackend, AttentionInputs
from mllm_compile.runtime.attention.capture import CapturesDecodes, CapturesVerify
from mllm_compile.runtime.attention.captured.decodes import check_capturable
from mllm_compile.runtime.attention.latent.choice import NUM_BLOCKS, ExpansionChoice, Widths, faster_on_gpu
from mllm_compile.runtime.attention.latent.expanded import ExpandedPrompts
from mllm_compile.runtime.attention.latent.expansion import MOST_EXPANDED_BYTES
from mllm_compile.runtime.attention.latent.products import absorb, apply_to_sums
from mllm_compile.runtime.attention.latent.tiles import PREFILL_TILE, num_decode_tiles, num_prefill_tiles
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.attention.layer_kernels import LatentKernels
from mllm_compile.runtime.attention.metadata import CommonAttentionMetadata, split_decodes_and_prefills
from mllm_compile.runtime.attention.split.page_table import PageTable
from mllm_compile.runtime.attention.split.split_decode import DecodePiece
from mllm_compile.runtime.attention.split.splits import OF_LATENTS
from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.errors import ConfigError, UnsupportedModelError
from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode

LatentPieces = LatentKernels[DecodePiece]
_ALIGNMENT = 64  # numbers
_ROOMS = 16  # views of a space that are kept


@dataclass(frozen=True)
class _Prompts:
    """The prompts of a batch, as layers of some widths see them.

    Attributes:
        expanded: the expanded prompts; empty for layers without their up-projection.
        tiles: [N, 4] int32 of the other prompts, on the device; None: all are expanded.
    """

    expanded: ExpandedPrompts
    tiles: torch.Tensor | None


@dataclass(frozen=True)
class _Plan:
    """One batch.

    Attributes:
        seq_lens: [R] int32, of decodes first; kernels read it when they run.
        prompts: widths of layers → the prompts; empty for decodes alone.
    """

    num_decodes: int
    seq_lens: torch.Tensor
    prompts: Mapping[Widths, _Prompts] = field(default_factory=dict)


class LatentAttnBackend(AttentionBackend, CapturesDecodes, CapturesVerify):
    """Attends over latents on a GPU."""

    rope = cascades = captured_cascades = mixed = prompts = None
    mixed_obstacle = "prompts over latents are given a list of their tiles by the host"
    query_blocks = 0.0

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        pieces: Mapping[str, LatentPieces],
        *,
        req_to_token: torch.Tensor,
        max_requests: int,
        page_size: int,
        dtype: torch.dtype,
        choice: ExpansionChoice = faster_on_gpu,
        most_expanded_bytes: int = MOST_EXPANDED_BYTES,
    ) -> None:
        """
        Args:
            layers: the model's, all of latents.
            pieces: layer → the program's own kernels.
            req_to_token: [rows, columns] int32: the slot of each position.
            max_requests: most requests of a batch.
            dtype: the type of queries and cache.
            choice: of the prompts that are expanded, where layers have their up-projection.
            most_expanded_bytes: of keys and values that are made of latents at once, and these.

        Raises:
            UnsupportedModelError: a layer has no kernels.
        """
        lacks = (layer.name for layer in layers if not _has_kernels(layer, pieces.get(layer.name)))
        without = next(lacks, None)
        if without is not None:
            raise UnsupportedModelError(
                f"attention layer {without} is over latents, and the runtime has no kernels for it. Compile the model "
                "again, with compile.disable_passes: [absorb_latents] to have keys and values of every head."
            )
        self._pieces = pieces
        self._table = PageTable(req_to_token, max_requests, page_size)
        kinds = {_kind(layer): layer for layer in layers}
        self._scratch = {kind: _Scratch(layer, max_requests, req_to_token.device) for kind, layer in kinds.items()}
        self._widths = {layer.name: Widths.of(layer) for layer in layers}
        self._kinds = {Widths.of(layer): layer for layer in layers}
        self._choice = choice
        self._space = _Space(layers, req_to_token, max_requests, dtype, most_expanded_bytes)
        self._captured: dict[int, torch.Tensor] = {}  # rows → the lengths that the captured kernels read
        self._plan: _Plan | None = None
        self._load_kernels(layers, page_size, dtype)

    def _load_kernels(self, layers: Sequence[AttentionLayer], page_size: int, dtype: torch.dtype) -> None:
        """Attend over one token of the dummy page with each piece, which loads its kernels."""
        device = self._table.pages.device
        self._table.list(torch.zeros(1, dtype=torch.int64, device=device))
        one = torch.ones(1, dtype=torch.int32, device=device)
        tiles, expanded_tiles = (
            torch.tensor([fields], dtype=torch.int32, device=device)
            for fields in ((0, 0, 1, 0), (0, 1, 0, 1, 1, 0, 0, 0))
        )
        nothing = ExpandedPrompts(np.arange(1), 1, ((tiles[0, :1], expanded_tiles),))
        plan = _Plan(1, one, dict.fromkeys(self._kinds, _Prompts(nothing, tiles)))
        for layer in {id(self._pieces[layer.name]): layer for layer in layers}.values():
            q = torch.zeros(1, layer.num_heads, layer.query_dim, dtype=dtype, device=device)
            latents = q.new_zeros(page_size, 1, layer.head_dim)
            self._attend(plan, layer, q, latents, q.new_empty(1, layer.num_heads, layer.out_dim))

    # Planning ---------------------------------------------------------------------------------------------------------

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        common = CommonAttentionMetadata.of(batch)
        num_decodes, num_prefills, *_ = split_decodes_and_prefills(common)
        self._table.list(batch.req_pool_indices[: common.num_reqs])
        prompts = {}
        if num_prefills:
            prompts = {widths: self._prompts(common, num_decodes, layer) for widths, layer in self._kinds.items()}
        self._plan = _Plan(num_decodes, common.seq_lens[: common.num_reqs], prompts)

    def _prompts(self, common: CommonAttentionMetadata, num_decodes: int, layer: AttentionLayer) -> _Prompts:
        if layer.up_projection is None:
            expanded = ExpandedPrompts(np.arange(num_decodes, common.num_reqs), common.num_actual_tokens)
        else:
            widths = self._widths[layer.name]
            most = self._space.most_tokens(widths), self._space.most_rows(widths)
            expanded = ExpandedPrompts.plan(common, num_decodes, widths, self._choice, *most, NUM_BLOCKS)
        if not len(expanded.others):
            return _Prompts(expanded, None)
        tiles = _prefill_tiles(common, expanded.others, layer.num_heads)
        return _Prompts(expanded, upload(tiles, self._table.pages.device))

    def writes_kv(self, layer: AttentionLayer) -> bool:
        return False

    def reads_pages(self, batch: ForwardBatch) -> bool:
        return True

    # Running ----------------------------------------------------------------------------------------------------------

    def forward_decode(self, inputs: AttentionInputs) -> None:
        self.forward_extend(inputs)

    def forward_extend(self, inputs: AttentionInputs) -> None:
        if self._plan is None:
            raise RuntimeError("call init_forward_metadata with the batch before forward")
        latents, _ = inputs.batch.token_to_kv_pool.get_kv_buffer(inputs.layer.layer_id)
        self._attend(self._plan, inputs.layer, inputs.q.contiguous(), latents, inputs.out)

    def _attend(
        self, plan: _Plan, layer: AttentionLayer, q: torch.Tensor, latents: torch.Tensor, out: torch.Tensor
    ) -> None:
        widths = self._widths[layer.name]
        prompts = plan.prompts.get(widths)
        if layer.up_projection is None:
            self._over_latents(plan, prompts, layer, q, latents, out)
            return
        num_rows = plan.num_decodes if prompts is None else prompts.expanded.num_other_rows
        if num_rows:  # may include rows of expanded prompts; those are overwritten below
            queries, sums = self._space.room_over_latents(widths, num_rows)
            absorb(q[:num_rows], layer, queries)
            self._over_latents(plan, prompts, layer, queries, latents, sums)
            apply_to_sums(sums, layer, out[:num_rows])
        piece = self._pieces[layer.name].expanded
        if prompts is not None and piece is not None:
            prompts.expanded.run(q, latents, layer, out, piece, partial(self._space.room, widths))

    def _over_latents(
        self,
        plan: _Plan,
        prompts: _Prompts | None,
        layer: AttentionLayer,
        q: torch.Tensor,
        latents: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        count, pieces, pages = plan.num_decodes, self._pieces[layer.name], self._table.pages
        if count:
            scratch = self._scratch[_kind(layer)].of(count)
            pieces.decode([q[:count], latents, pages[:count], plan.seq_lens[:count], out[:count], *scratch])
        if prompts is not None and prompts.tiles is not None:
            pieces.prefill([q, latents, pages[: plan.seq_lens.shape[0]], plan.seq_lens, prompts.tiles, out])

    # CUDA graphs ------------------------------------------------------------------------------------------------------

    @property
    def decodes(self) -> CapturesDecodes:
        return self

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
    def verifies(self) -> CapturesVerify:
        return self

    def init_forward_metadata_capture_verify(self, num_rows: int, num_tokens: int, seq_lens: torch.Tensor) -> None:
        self._plan = _Plan(num_rows, seq_lens)

    def begin_captured_verify(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Does nothing: kernels read the page table and lengths."""


def _has_kernels(layer: AttentionLayer, pieces: LatentPieces | None) -> bool:
    return pieces is not None and (layer.up_projection is None or pieces.expanded is not None)


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


class _Space:
    """The memory of layers with their up-projection, one after the other: for queries and sums of what attends over
    latents, then for keys and values."""

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        req_to_token: torch.Tensor,
        max_requests: int,
        dtype: torch.dtype,
        most_bytes: int,
    ) -> None:
        kinds = {Widths.of(layer) for layer in layers if layer.up_projection is not None}
        # Whatever most_bytes says, a step of decodes has room.
        numbers = max((max_requests * widths.numbers_of_a_row for widths in kinds), default=0)
        wanted = max((req_to_token.numel() * widths.numbers_of_a_token for widths in kinds), default=0)
        numbers = max(numbers, min(wanted, most_bytes // dtype.itemsize))
        # A backend's own: launches of another, of the other part of a divided step say, may come between two of its.
        self._memory = torch.zeros(numbers + _ALIGNMENT if kinds else 0, dtype=dtype, device=req_to_token.device)
        self._rooms: dict[tuple[tuple[int, ...], ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def most_tokens(self, widths: Widths) -> int:
        """Tokens of a part, at least one."""
        return max(1, (self._memory.numel() - _ALIGNMENT) // widths.numbers_of_a_token)

    def most_rows(self, widths: Widths) -> int:
        """New tokens that attend over latents."""
        return (self._memory.numel() - _ALIGNMENT) // widths.numbers_of_a_row

    def room(self, widths: Widths, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for latents [K, W], and for keys and values [K, H, n + v], until the next call."""
        of_keys_and_values = num_keys, widths.num_heads, widths.key + widths.value
        return self._two((num_keys, widths.cached), of_keys_and_values)

    def room_over_latents(self, widths: Widths, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for queries [T, H, D] and for their sums of latents [T, H, C], likewise."""
        of_heads = num_rows, widths.num_heads
        return self._two((*of_heads, widths.cached), (*of_heads, widths.rank))

    def _two(self, *shapes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Two tensors, one behind the other; kept, as every layer of a step asks for the same."""
        if shapes not in self._rooms:
            if len(self._rooms) == _ROOMS:
                self._rooms.clear()
            first, second = map(math.prod, shapes)
            start = -(-first // _ALIGNMENT) * _ALIGNMENT
            parts = self._memory[:first], self._memory[start : start + second]
            self._rooms[shapes] = parts[0].view(shapes[0]), parts[1].view(shapes[1])
        return self._rooms[shapes]


def _prefill_tiles(common: CommonAttentionMetadata, requests: np.ndarray, num_heads: int) -> np.ndarray:
    """[N, 4] int32 of these requests, as latent_prefill takes them: those with the most keys first, so that no long one
    begins when the others have ended."""
    starts = common.query_start_loc_cpu.numpy()
    num_tokens = np.diff(starts)[requests]
    counts = num_prefill_tiles(num_tokens, num_heads)
    of_tile = np.repeat(np.arange(len(requests)), counts)
    first_tiles = np.cumsum(counts) - counts
    first_rows = (np.arange(len(of_tile)) - first_tiles[of_tile]) * PREFILL_TILE.rows
    tiles = np.stack((requests[of_tile], starts[requests][of_tile], num_tokens[of_tile], first_rows), axis=1)
    num_keys = common.num_computed_tokens_cpu.numpy()[requests][of_tile] + first_rows // num_heads
    return np.ascontiguousarray(tiles[np.argsort(-num_keys, kind="stable")], dtype=np.int32)
