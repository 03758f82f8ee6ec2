"""Attention by FlashInfer's kernels over the paged cache (CUDA only, imported when the backend is made).

A batch has, per plan group (layers equal in window, soft cap, scale and heads), a plan for the prefills
(flashinfer/prefill.py). It has another for the decodes, which come first (flashinfer/decode.py), unless the program has
its own kernel for them (split_decode.py). flashinfer/wrappers.py makes the planners; flashinfer/kernels.py chooses
FlashInfer's kernel for each; flashinfer/plan.py has pages and plan buffers. Decodes can be captured in a CUDA graph
(captured/decodes.py, captured/cascades.py); so can steps with prompts, where fa3 and the program's own kernels serve
them (captured/mixed.py), and prompts alone (captured/prompts.py).

Shape legend: T tokens, R requests, H query heads, Hk kv heads, D head dim, P page entries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from mllm_compile.runtime.attention.base import AttentionBackend, AttentionInputs
from mllm_compile.runtime.attention.capture import (
    CapturesCascades,
    CapturesDecodes,
    CapturesMixed,
    CapturesPrompts,
    CapturesVerify,
    Cascades,
    FusesRope,
    RopeInputs,
)
from mllm_compile.runtime.attention.captured.cascades import CapturedCascades
from mllm_compile.runtime.attention.captured.decodes import DecodeSteps, check_capturable, make_graph_buffers
from mllm_compile.runtime.attention.captured.mixed import CapturedMixed, MixedSteps
from mllm_compile.runtime.attention.captured.prefill_cached import CachedPrefillSteps
from mllm_compile.runtime.attention.captured.prefill_new import NewPrefillSteps
from mllm_compile.runtime.attention.captured.prompts import CapturedPrompts
from mllm_compile.runtime.attention.flashinfer.blocks import ImageBlocks
from mllm_compile.runtime.attention.flashinfer.cascade import CascadeRows, FlashInferCascade
from mllm_compile.runtime.attention.flashinfer.decode import DecodeBatch, PlannedGroup, SplitGroup
from mllm_compile.runtime.attention.flashinfer.kernels import (
    PlanGroup,
    captured_cascade_pays,
    cascade_pays,
    check_never_split,
    prefills_new_tokens_alone,
    should_use_tensor_core,
    spared_bytes,
)
from mllm_compile.runtime.attention.flashinfer.plan import PagedView, make_paged_view
from mllm_compile.runtime.attention.flashinfer.planned import DecodeMetadata, Planned, PrefillMetadata
from mllm_compile.runtime.attention.flashinfer.prefill import GroupPiecePrefill, GroupPrefill, PiecePrefill, PrefillRows
from mllm_compile.runtime.attention.flashinfer.prefix_parts import DividedPrefill
from mllm_compile.runtime.attention.flashinfer.sinks import run_with_sinks
from mllm_compile.runtime.attention.flashinfer.wrappers import GroupWrappers
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.attention.metadata import (
    CommonAttentionMetadata,
    split_decodes_and_prefills,
)
from mllm_compile.runtime.attention.split.cascade import PieceCascade
from mllm_compile.runtime.attention.split.split_decode import SplitDecode
from mllm_compile.runtime.errors import ConfigError
from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode

__all__ = [
    "DecodeMetadata",
    "FlashInferAttnBackend",
    "PrefillMetadata",
    "should_use_tensor_core",
]


class FlashInferAttnBackend(AttentionBackend, FusesRope, Cascades, CapturesDecodes, CapturesVerify):
    """Attends by FlashInfer; the KV pool comes with each batch."""

    def __init__(self, wrappers: GroupWrappers) -> None:
        """
        Args:
            wrappers: of the model's layers. Their kernels are loaded here.

        Raises:
            DeviceError: FlashInfer lacks a kernel.
        """
        self._wrappers = wrappers
        self.groups = wrappers.groups
        self._group_of = wrappers.group_of
        self._group_decodes = wrappers.decodes
        self._group_prefills = wrappers.prefills
        self._group_cascades = wrappers.cascades
        self._split_space = wrappers.split_space
        self._has_piece_prefills = any(isinstance(prefill, GroupPiecePrefill) for prefill in self._group_prefills)
        self._cascaded = [
            layer for layer in wrappers.layers if self._group_cascades[self._group_of[layer.name]] is not None
        ]
        self.kv_cache_dtype = wrappers.kv_cache_dtype
        self.page_size = wrappers.page_size
        self.req_to_token = wrappers.req_to_token
        self._decode_steps: DecodeSteps | None = None  # see init_cuda_graph_state
        self._planned = Planned()
        self._captured_cascades = self._make_captured_cascades()
        self._captured_mixed = self._make_captured_mixed()
        self._captured_prompts = self._make_captured_prompts()
        self._image_blocks: ImageBlocks | None = None
        wrappers.load()

    # Planning ---------------------------------------------------------------------------------------------------------

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        common = CommonAttentionMetadata.of(batch)
        num_decodes, num_prefills, *_ = split_decodes_and_prefills(common)

        @cache
        def pages_of(window_left: int) -> PagedView:
            return make_paged_view(
                common.block_table,
                batch.req_pool_indices,
                common.seq_lens_cpu,
                common.num_computed_tokens_cpu,
                window_left,
                self.page_size,
            )

        num_listed = num_decodes + num_prefills if self._has_piece_prefills else num_decodes
        if self._split_space is not None and num_listed:  # the program's own kernels read the pages of these
            self._split_space.list_pages(batch.req_pool_indices[:num_listed])
        self._planned.set(None, None, num_decodes=0)  # what fails below leaves no plan of another batch
        decodes = prefills = None
        if num_decodes:
            rows = DecodeBatch(
                common.seq_lens[:num_decodes],
                lambda window, _: pages_of(window).part(0, num_decodes),
                behind_writes=batch.sees_ahead,
            )
            decodes = DecodeMetadata(self._plan_decodes(batch, rows))
        if num_prefills:
            prefills = self._plan_prefills(batch, num_decodes, pages_of)
        self._planned.set(decodes, prefills, num_decodes, has_blocks=self._plan_blocks(batch))

    @property
    def decode_metadata(self) -> DecodeMetadata | None:
        """The planned decodes."""
        return self._planned.decodes

    @property
    def prefill_metadata(self) -> PrefillMetadata | None:
        """The planned prefills."""
        return self._planned.prefills

    def _plan_blocks(self, batch: ForwardBatch) -> bool:
        """Plans the batch's image blocks; False without images."""
        blocks = batch.media.blocks if batch.media is not None else ()
        if not blocks:
            return False
        if self._image_blocks is None:
            self._image_blocks = ImageBlocks(self._wrappers.make_prefill, self.groups, self.page_size)
        self._image_blocks.plan(batch, blocks, CommonAttentionMetadata.of(batch).block_table)
        return True

    def _plan_decodes(self, batch: ForwardBatch, decodes: DecodeBatch) -> list[Any]:
        """The wrapper of each group; cascades where the batch's decodes begin alike and the group has one."""
        if not batch.common_prefix_len:
            return [group.plan(decodes) for group in self._group_decodes]
        rows = self._cascade_rows(batch, len(decodes.seq_lens))
        return [
            decode.plan(decodes) if cascade is None else cascade.plan(rows)
            for decode, cascade in zip(self._group_decodes, self._group_cascades, strict=True)
        ]

    def _cascade_rows(self, batch: ForwardBatch, num_decodes: int) -> CascadeRows:
        common, count = CommonAttentionMetadata.of(batch), batch.common_prefix_len
        rows, lengths = batch.req_pool_indices[:num_decodes], common.seq_lens_cpu[:num_decodes]
        table, size, shared = common.block_table, self.page_size, torch.tensor([count], dtype=torch.int32)
        return CascadeRows(
            make_paged_view(table, rows[:1], shared, shared, -1, size),
            make_paged_view(table, rows, lengths, lengths - 1, -1, size, skipped_pages=count // size),
        )

    def _plan_prefills(
        self, batch: ForwardBatch, num_decodes: int, pages_of: Callable[[int], PagedView]
    ) -> PrefillMetadata:
        """Plan requests num_decodes … R."""
        common = CommonAttentionMetadata.of(batch)
        starts = common.query_start_loc_cpu[num_decodes:]
        qo_indptr_cpu = starts - starts[0]
        prefix_lens = common.num_computed_tokens_cpu[num_decodes:].numpy()
        use_ragged = prefills_new_tokens_alone(self.kv_cache_dtype, has_prefix=bool(prefix_lens.any()))
        rows = PrefillRows(
            qo_indptr_cpu,
            np.diff(qo_indptr_cpu.numpy()),
            prefix_lens,
            use_ragged,
            lambda window_left: pages_of(window_left).part(num_decodes, common.num_reqs),
            common.seq_lens[: common.num_reqs],
            starts.numpy(),
            first_slot=batch.first_slot if len(prefix_lens) == 1 else None,
            slots=lambda: self._slots_of_prefills(batch, num_decodes),
        )
        wrappers = [group.plan(rows) for group in self._group_prefills]
        return PrefillMetadata(wrappers, use_ragged, first_token=num_decodes)

    def _slots_of_prefills(self, batch: ForwardBatch, num_decodes: int) -> torch.Tensor:
        """Slots of all keys of requests num_decodes … R, one after another."""
        common = CommonAttentionMetadata.of(batch)
        lengths = common.seq_lens_cpu[num_decodes : common.num_reqs], common.num_computed_tokens_cpu[num_decodes:]
        rows = batch.req_pool_indices[num_decodes : common.num_reqs]
        return make_paged_view(common.block_table, rows, *lengths, -1, page_size=1).indices

    def writes_kv(self, layer: AttentionLayer) -> bool:
        return False

    def reads_pages(self, batch: ForwardBatch) -> bool:
        is_captured = self._captured_mixed is not None and self._captured_mixed.steps.holds(batch.num_tokens)
        reads_new_alone = prefills_new_tokens_alone(self.kv_cache_dtype, has_prefix=False)
        if is_captured or self._has_piece_prefills or batch.media is not None or not reads_new_alone:
            return True
        return not CommonAttentionMetadata.of(batch).is_fresh

    # Running ----------------------------------------------------------------------------------------------------------

    def forward_decode(self, inputs: AttentionInputs) -> None:
        layer = inputs.layer
        pages = inputs.batch.token_to_kv_pool.get_pages(layer.layer_id)
        _run_decode(self._decode_wrapper(layer), inputs.q, pages, inputs.out, layer, inputs.bias)

    def forward_extend(self, inputs: AttentionInputs) -> None:
        decodes, prefills, num_decodes = self.decode_metadata, self.prefill_metadata, self._planned.num_decodes
        if decodes is None and prefills is None:
            raise RuntimeError("call init_forward_metadata with the batch before forward")
        q, out, layer = inputs.q, inputs.out, inputs.layer
        pages = inputs.batch.token_to_kv_pool.get_pages(layer.layer_id)
        group_index = self._group_index(layer)
        if decodes is not None:
            wrapper, of_decodes = decodes.decode_wrappers[group_index], slice(num_decodes)
            _run_decode(wrapper, q[of_decodes], pages, out[of_decodes], layer, inputs.bias)
        if prefills is not None:
            wrapper = prefills.prefill_wrappers[group_index]
            if isinstance(wrapper, PiecePrefill):
                wrapper.run(q, pages, out, inputs.bias)
                return
            new = slice(prefills.first_token, None)
            if isinstance(wrapper, DividedPrefill):
                wrapper.run(q[new], inputs.k[new], inputs.v[new], pages, out[new])
            else:
                keys_and_values = (inputs.k[new], inputs.v[new]) if prefills.use_ragged else (pages,)
                run_with_sinks(wrapper, q[new], *keys_and_values, out=out[new], sinks=layer.sink_logits)
        media, blocks = inputs.batch.media, self._image_blocks
        if self._planned.has_blocks and blocks is not None and media and media.blocks_of(layer.params.window_left):
            blocks.run(group_index, q, pages, out, layer)

    @property
    def cascades(self) -> Cascades | None:
        return self if self._cascaded else None

    def cascade_pays(self, num_requests: int, num_tokens: int, is_captured: bool = False) -> bool:
        spared = spared_bytes(self._cascaded, num_requests, num_tokens, self.kv_cache_dtype.itemsize)
        return (captured_cascade_pays if is_captured else cascade_pays)(spared, len(self._cascaded))

    @property
    def query_blocks(self) -> float:
        heads = [group.num_heads for group in self.groups if self._wrappers.has_fa3(group)]
        return self._wrappers.num_sms / max(heads) if heads else 0.0

    @property
    def rope(self) -> FusesRope:
        return self

    def fuses_rope(self, layer: AttentionLayer) -> bool:
        if self.decode_metadata is None or self.prefill_metadata is not None:
            return False
        wrapper = self._decode_wrapper(layer)
        return isinstance(wrapper, SplitDecode) and wrapper.fuses_rope

    def forward_with_rope(
        self, rope_inputs: RopeInputs, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        pages = batch.token_to_kv_pool.get_pages(layer.layer_id)
        self._decode_wrapper(layer).run_with_rope(rope_inputs, pages, out, layer.sink_logits)

    def _group_index(self, layer: AttentionLayer) -> int:
        if layer.name not in self._group_of:
            self._group_of[layer.name] = self.groups.index(PlanGroup.of(layer))
        return self._group_of[layer.name]

    def _decode_wrapper(self, layer: AttentionLayer) -> Any:
        if self.decode_metadata is None:
            raise RuntimeError("call init_forward_metadata with the batch before forward")
        return self.decode_metadata.decode_wrappers[self._group_index(layer)]

    # CUDA graphs ------------------------------------------------------------------------------------------------------

    @property
    def mixed(self) -> CapturesMixed | None:
        return self._captured_mixed

    @property
    def prompts(self) -> CapturesPrompts | None:
        return self._captured_prompts

    @property
    def captured_cascades(self) -> CapturesCascades | None:
        return self._captured_cascades

    @property
    def mixed_obstacle(self) -> str | None:
        if not self._group_prefills:
            return "batches are decodes alone"
        for decode, prefill in zip(self._group_decodes, self._group_prefills, strict=True):
            if not isinstance(decode, SplitGroup):
                return "decodes of some layers run by FlashInfer's kernels and not by the program's"
            if obstacle := prefill.capture_obstacle():
                return obstacle
        return None

    def _make_captured_mixed(self) -> CapturedMixed | None:
        """None where something is in the way."""
        if self._split_space is None or self.mixed_obstacle:
            return None
        decodes = [decode for decode in self._group_decodes if isinstance(decode, SplitGroup)]
        prefills = [prefill for prefill in self._group_prefills if isinstance(prefill, GroupPrefill)]
        steps = MixedSteps(decodes, prefills, self._split_space, self._wrappers.max_requests, self._wrappers.device)
        return CapturedMixed(steps, prefills, self._planned)

    def _make_captured_prompts(self) -> CapturedPrompts | None:
        """None where something is in the way."""
        if self._captured_mixed is None or not prefills_new_tokens_alone(self.kv_cache_dtype, has_prefix=False):
            return None
        groups = [group for group in self._group_prefills if isinstance(group, GroupPrefill)]
        works = [group.works for group in groups if group.works is not None]
        if len(works) < len(groups):
            return None
        return CapturedPrompts(
            NewPrefillSteps(groups, works), CachedPrefillSteps(groups, works, self.page_size), self._planned
        )

    def _make_captured_cascades(self) -> CapturedCascades | None:
        """None where the program has no kernels for them, or decodes are planned before a replay."""
        prefix, page_table = self._wrappers.shared_prefix, self.page_table
        if prefix is None or page_table is None:
            return None
        return CapturedCascades(self._wrappers.piece_cascades, self.groups, prefix, page_table, self._planned)

    @property
    def decodes(self) -> CapturesDecodes:
        return self

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """0 if the program's own kernels run all decodes: they pass such rows over. Else 1, a key of the dummy page,
        since FlashInfer would take 0 for a full last page."""
        return 0 if all(isinstance(decode, SplitGroup) for decode in self._group_decodes) else 1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured kernels read.

        Args:
            max_bs: largest captured batch.
            max_num_tokens: its tokens; max_bs, as only single-token decodes are captured.

        Raises:
            ConfigError: more tokens than rows, or a deterministic decode that FlashInfer could split.
        """
        if max_num_tokens != max_bs:
            raise ConfigError(f"only decodes of one token are captured: {max_bs} requests, {max_num_tokens} tokens")
        if self._wrappers.deterministic:
            planned = [
                group
                for group, decode in zip(self.groups, self._group_decodes, strict=True)
                if isinstance(decode, PlannedGroup)
            ]
            check_never_split(planned, max_bs, self._wrappers.num_sms)
        max_pages = -(-self._wrappers.max_context_len // self.page_size)
        buffers = make_graph_buffers(len(self.groups), max_bs, max_pages, self._wrappers.device)
        self._decode_steps = DecodeSteps(self._group_decodes, self._split_space, buffers)

    @property
    def page_table(self) -> torch.Tensor | None:
        if self._split_space is None or not all(isinstance(decode, SplitGroup) for decode in self._group_decodes):
            return None
        return self._split_space.page_table

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: ForwardMode,
    ) -> None:
        """Make the wrappers of captured batches of `bs` rows and plan them for rows of one token on the dummy page.

        The addresses that a captured kernel reads are this backend's; only their contents change with each replay.
        """
        check_capturable(forward_mode, bs, num_tokens)
        self._set_decodes(bs, self._captured_decodes.capture(bs, req_pool_indices, seq_lens))

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: ForwardMode,
        seq_lens_cpu: torch.Tensor,
    ) -> None:
        """Plan the captured batch of `bs` rows for these requests; without it a replay reads the pages of the last one.

        Args:
            req_pool_indices: [bs] int64, row 0 for padding.
            seq_lens, seq_lens_cpu: [bs] int32, on the device and on the host; of padding see
                get_cuda_graph_seq_len_fill_value.
        """
        check_capturable(forward_mode, bs, bs)

        def list_pages(window_left: int, indices_out: torch.Tensor | None) -> PagedView:
            computed = seq_lens_cpu - 1
            table = self.req_to_token
            return make_paged_view(
                table, req_pool_indices, seq_lens_cpu, computed, window_left, self.page_size, indices_out
            )

        decodes = DecodeBatch(seq_lens, list_pages)
        self._set_decodes(bs, self._captured_decodes.replay(bs, req_pool_indices, decodes))

    @property
    def _captured_decodes(self) -> DecodeSteps:
        if self._decode_steps is None:
            raise RuntimeError("call init_cuda_graph_state before a capture")
        return self._decode_steps

    @property
    def verifies(self) -> CapturesVerify | None:
        return None if self.page_table is None else self

    def init_forward_metadata_capture_verify(self, num_rows: int, num_tokens: int, seq_lens: torch.Tensor) -> None:
        groups = [decode for decode in self._group_decodes if isinstance(decode, SplitGroup)]
        self._set_decodes(num_rows, [group.plan_verify(num_tokens, seq_lens) for group in groups])

    def begin_captured_verify(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Does nothing: kernels read the page table and lengths."""

    def _set_decodes(self, bs: int, wrappers: list[Any]) -> None:
        self._planned.set(DecodeMetadata(wrappers), None, num_decodes=bs)


def _run_decode(
    wrapper: Any,
    q: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    layer: AttentionLayer,
    bias: torch.Tensor | None,
) -> None:
    """Runs a wrapper of decodes; the program's own kernels take sinks themselves, and layers with some no cascade. They
    alone serve layers with a bias."""
    if isinstance(wrapper, FlashInferCascade | PieceCascade):
        wrapper.run(q, pages, out)
    elif isinstance(wrapper, SplitDecode):
        wrapper.run(q, pages, out, layer.sink_logits, bias)
    else:
        run_with_sinks(wrapper, q, pages, out=out, sinks=layer.sink_logits)
