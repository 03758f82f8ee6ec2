"""Prefills of one plan group, by FlashInfer's wrappers: planned on the host for every batch, run per layer.

flashinfer/kernels.py chooses the kernel of a batch.

Shape legend: R requests with prefills.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mllm_compile.runtime.attention.flashinfer.copied import CopiedPrefill, CopySpace, RowPrefill
from mllm_compile.runtime.attention.flashinfer.kernels import (
    BLOCKS_PER_SM,
    CAPTURED_PREFILL,
    PlanGroup,
    PrefillKernel,
    choose_prefill_kernel,
    prefill_capture_obstacle,
    prefill_kernels,
    runs_well_captured,
)
from mllm_compile.runtime.attention.flashinfer.plan import PagedView, PlanSpace
from mllm_compile.runtime.attention.flashinfer.prefix_parts import DividedPrefill, pages_in_parts
from mllm_compile.runtime.attention.flashinfer.work_list import SplitList, WorkList
from mllm_compile.runtime.attention.split.prefill_tiles import list_tiles
from mllm_compile.runtime.attention.split.split_decode import DecodePiece, SplitDecodeSpace, typed_bias
from mllm_compile.runtime.cuda.driver import copy_pinned
from mllm_compile.runtime.device.upload import upload

# (flashinfer's kernel, whether it reads new keys and values and no pages, further arguments by name) → a new wrapper
WrapperMaker = Callable[..., Any]

_NOT_CAUSAL = PrefillKernel("fa2", splits=False)  # whose windows do not depend on causality


@dataclass(frozen=True)
class PrefillRows:
    """The prefills of a batch."""

    qo_indptr_cpu: torch.Tensor  # [R + 1] int32: where each one's new tokens start
    query_lens: np.ndarray  # [R] int32: new tokens
    prefix_lens: np.ndarray  # [R] int32: tokens before them
    use_ragged: bool  # keys and values are read as they come, not from the pages
    pages_of: Callable[[int], PagedView]  # window_left → their pages
    seq_lens: torch.Tensor  # [R' ≥ R] int32 on the device, of all requests of the batch, prompts last
    first_tokens: np.ndarray  # [R + 1] int32: as qo_indptr_cpu, counted from the batch's first token
    causal: bool = True  # else each token sees all of its request's keys
    first_slot: int | None = None  # of the keys of the only one, where its pages follow each other
    # [K] int32 on the device: of all their keys, one after another; none of blocks, whose keys are not copied
    slots: Callable[[], torch.Tensor] | None = None


class CapturedPrefill:
    """A wrapper of fa3 in a captured step: see captured/mixed.py."""

    def __init__(
        self,
        wrapper: Any,
        space: PlanSpace,
        size: tuple[int, int],
        page_starts: np.ndarray,
        heads: tuple[int, int, int],
        page_size: int,
        num_sms: int,
    ) -> None:
        """
        Args:
            wrapper: planned once by its own `plan`.
            size: T, and the rows that there may be.
            page_starts: [rows + 1] int32: where each row's page ids start.
            heads: query heads, KV heads, head dim.
        """
        self._wrapper = wrapper
        self._space = space
        self._num_tokens, self._num_rows = size
        self._page_starts = page_starts
        self._num_heads, self._num_kv_heads, self._head_dim = heads
        self._page_size = page_size
        self._layout = list(wrapper._plan_info)
        shares_schedule = bool(self._layout[-1])  # among heads: then the list is made otherwise
        num_heads, _, head_dim = heads
        self._works = None if shares_schedule else WorkList(self._layout, num_heads, head_dim, num_sms)

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, **options: Any) -> Any:
        """q, out: [T, H, D]; pages: k and v, [pages, page_size, Hk, D]; and as the wrapper's own."""
        return self._wrapper.run(q, pages, out=out, **options)

    def plan(self, starts: np.ndarray, num_keys: np.ndarray, first_row: int = 0) -> None:
        """Makes the list of work, or calls the kernel's own plan: the wrapper's takes a millisecond for 256 rows, and
        the kernel reads none of it.

        Args:
            starts: [R + 1] int32: the first token of each prompt, and the end of the last one.
            num_keys: [R] int32.
            first_row: row of the first prompt.

        Raises:
            RuntimeError: the plan is not where the captured kernel reads it.
        """
        wrapper = self._wrapper
        with self._space.planning(wrapper):
            if self._works is not None:
                pinned = wrapper._pin_memory_int_workspace_buffer
                memory = pinned.view(torch.int32).numpy()
                if num_bytes := self._works.write(memory, starts, self._page_starts[first_row:], num_keys):
                    copy_pinned(pinned, wrapper._int_workspace_buffer, num_bytes)
                    return
            # Rows before and behind the prompts have no queries.
            rows = slice(first_row, first_row + num_keys.size)
            all_starts = np.full(self._num_rows + 1, starts[-1], dtype=np.int32)
            all_starts[:first_row], all_starts[rows] = starts[0], starts[:-1]
            all_keys = np.zeros(self._num_rows, dtype=np.int32)
            all_keys[rows] = num_keys
            layout = wrapper._cached_module.plan(
                wrapper._float_workspace_buffer,
                wrapper._int_workspace_buffer,
                wrapper._pin_memory_int_workspace_buffer,
                torch.from_numpy(all_starts),
                torch.from_numpy(self._page_starts),
                torch.from_numpy(all_keys),
                self._num_tokens,
                self._num_rows,
                self._num_heads,
                self._num_kv_heads,
                self._page_size,
                True,  # for a CUDA graph
                self._head_dim,
                self._head_dim,
                True,  # causal
                -1,  # no window
            )
        if list(layout) != self._layout:
            raise RuntimeError(
                f"FlashInfer's plan has moved from {self._layout} to {list(layout)}, where no captured kernel reads "
                "it. Set cudagraph.mixed_tokens: []."
            )


class PiecePrefill:
    """The prompts of a batch by the program's own kernel (ops/attention/prefill.py), which reads pages and lengths on
    the device, and a list of tiles that the host has made."""

    def __init__(self, piece: DecodePiece, batch: list[torch.Tensor], slopes: list[torch.Tensor]) -> None:
        """Args: batch: page_table [R, W], seq_lens [R] and tiles [N, 4], int32 each; slopes: of the layers, if any."""
        self._piece = piece
        self._batch = batch
        self._slopes = slopes

    def run(
        self,
        q: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        """q, out: [T, H, D], of all tokens of the batch; pages: k and v, [pages, page_size, Hk, D]; bias: of the layer,
        if it has one."""
        keys, values = (cache.flatten(0, 1) for cache in pages)
        self._piece([q.contiguous(), keys, values, *self._batch, out, *self._slopes, *typed_bias(bias, q)])


class GroupPiecePrefill:
    """The prompts of one plan group by the program's own kernel."""

    def __init__(self, piece: DecodePiece, group: PlanGroup, space: SplitDecodeSpace, dtype: torch.dtype) -> None:
        """Args: space: has the page table of the present batch."""
        self._piece = piece
        self._group = group
        self._space = space
        self._dtype = dtype

    def load(self) -> None:
        """Attend for one token of the dummy page, which loads the kernel."""
        device, group = self._space.page_table.device, self._group
        one = torch.ones(1, dtype=torch.int32, device=device)
        self._space.list_pages(one.long() - 1)
        q = torch.zeros(1, group.num_heads, group.head_dim, dtype=self._dtype, device=device)
        page = q.new_zeros(1, self._space.page_size, group.num_kv_heads, group.head_dim)
        tiles = torch.tensor([[0, 0, 1, 0]], dtype=torch.int32, device=device)
        bias = q.new_zeros(group.num_heads, 1) if group.has_distance_bias else None
        self._prefill([self._space.page_table[:1], one, tiles]).run(q, (page, page), torch.empty_like(q), bias)

    def plan(self, prefills: PrefillRows) -> PiecePrefill:
        """The wrapper for a batch that runs now, whose pages are listed."""
        seq_lens = prefills.seq_lens
        tiles = list_tiles(prefills.first_tokens, prefills.prefix_lens, len(seq_lens) - prefills.prefix_lens.size)
        return self._prefill([self._space.page_table[: len(seq_lens)], seq_lens, upload(tiles, seq_lens.device)])

    def capture_obstacle(self) -> str:
        return "prompts with a bias by distance or in chunks are given a list of their tiles by the host"

    def _prefill(self, batch: list[torch.Tensor]) -> PiecePrefill:
        return PiecePrefill(self._piece, batch, self._space.slopes_of(self._group))


class GroupPrefill:
    """One wrapper a kernel and way of reading, made when it is first needed."""

    def __init__(
        self,
        make_wrapper: WrapperMaker,
        group: PlanGroup,
        page_size: int,
        kv_cache_dtype: torch.dtype,
        options: dict[str, Any],
        device: torch.device,
        copies: CopySpace | None = None,
        merge: Callable[..., None] | None = None,
        takes_fa3: bool = True,
    ) -> None:
        """
        Args:
            options: plan()'s keyword arguments.
            takes_fa3: fa3 serves prompts too, on Hopper.
            copies: where keys and values may be copied to; None: they never are.
            merge: flashinfer.merge_state_in_place; None: what is before a chunk is never divided.
        """
        self._make_wrapper = make_wrapper
        self._group = group
        self._heads = (group.num_heads, group.num_kv_heads, group.head_dim)
        self._page_size = page_size
        self._kv_cache_dtype = kv_cache_dtype
        self._options = options
        self._device = device
        properties = torch.cuda.get_device_properties(device)
        self._num_sms = properties.multi_processor_count
        self._is_hopper = properties.major == 9 and takes_fa3
        self._space = PlanSpace(device)
        self._copies = copies
        self._most_copied = 0
        if copies is not None:
            self._most_copied = copies.most_tokens(group.num_kv_heads, group.head_dim, kv_cache_dtype)
        self._merge = None if group.has_sinks else merge
        self._parts_space: PlanSpace | None = None  # beside the other: both are read in one step
        self._parts_wrappers: dict[bool, Any] = {}  # by whether they read keys in a row
        self._wrappers: dict[tuple[str, bool], Any] = {}
        self._works = None
        if self._is_hopper:
            self._works = WorkList.short(group.num_heads, group.head_dim, self._num_sms)
        self._planned: set[int] = set()  # wrappers that have a list alone to be given: those planned once

    @property
    def kernels(self) -> tuple[str, ...]:
        """FlashInfer's kernels that batches may get. One is the same library for pages and for new tokens alone."""
        return prefill_kernels(self._group, self._kv_cache_dtype, self._is_hopper)

    def load(self) -> None:
        """Plan one token of one page with each kernel, so that no request waits for one to be loaded or compiled."""
        start, one = torch.tensor([0, 1], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        page = PagedView(start, torch.zeros(1, dtype=torch.int32, device=self._device), one)
        token = PrefillRows(start, one.numpy(), one.numpy() - 1, False, lambda window_left: page, one, start.numpy())
        for name in self.kernels:
            self._plan(PrefillKernel(name, splits=False), token)

    def plan(self, prefills: PrefillRows) -> Any:
        """The wrapper for a batch that runs now; without causality, of fa2."""
        if not prefills.causal:
            return self._plan(_NOT_CAUSAL, prefills)
        lengths = prefills.query_lens, prefills.prefix_lens
        sms, most_copied = (self._num_sms, self._is_hopper), 0 if prefills.slots is None else self._most_copied
        allowed, in_a_row = (most_copied, self._merge is not None), self._is_in_a_row(prefills.first_slot)
        kernel = choose_prefill_kernel(self._group, self._kv_cache_dtype, *lengths, *sms, *allowed, in_a_row=in_a_row)
        if kernel.copies and self._copies is not None and prefills.slots is not None:
            return self._plan_copied(self._copies, kernel, prefills, prefills.slots())
        if kernel.parts > 1 and self._merge is not None:
            return self._plan_divided(self._merge, kernel, prefills)
        if kernel.in_a_row and prefills.first_slot is not None:
            return self._plan_row(kernel, prefills, prefills.first_slot)
        return self._plan(kernel, prefills)

    def _is_in_a_row(self, first_slot: int | None) -> bool:
        """True if keys are contiguous and may be read so: the setting is copies' setting."""
        return first_slot is not None and self._copies is not None

    def capture_obstacle(self) -> str | None:
        """The reason why `capture` may not be called; None: it may."""
        return prefill_capture_obstacle(self._group, self._kv_cache_dtype, self._is_hopper)

    def runs_well_captured(
        self, query_lens: np.ndarray, prefix_lens: np.ndarray, first_slot: int | None = None
    ) -> bool:
        """True if the kernel of `capture` serves these prefills [R] about as fast as any other would."""
        allowed, in_a_row = (self._most_copied, self._merge is not None), self._is_in_a_row(first_slot)
        lengths = query_lens, prefix_lens
        return runs_well_captured(
            self._group, self._kv_cache_dtype, *lengths, self._num_sms, *allowed, in_a_row=in_a_row
        )

    def capture(self, num_tokens: int, page_table: torch.Tensor) -> CapturedPrefill:
        """Capture steps of `num_tokens`, whose requests' page ids are the rows of `page_table` [R, W] int32."""
        num_rows, num_pages = page_table.shape
        sizes, ids = torch.zeros(num_rows + 1, dtype=torch.int32, device=self._device), page_table.flatten()
        buffers = {
            "qo_indptr_buf": sizes,
            "paged_kv_indptr_buf": sizes,
            "paged_kv_indices_buf": ids,
            "paged_kv_last_page_len_buf": sizes[1:],
        }
        wrapper = self._space.adopt(self._make_wrapper(CAPTURED_PREFILL.name, False, use_cuda_graph=True, **buffers))
        # One request has all tokens in FlashInfer's own plan, which tells the wrapper how many there may be.
        starts = torch.full((num_rows + 1,), num_tokens, dtype=torch.int32)
        starts[0] = 0
        pages = torch.arange(num_rows + 1, dtype=torch.int32) * num_pages
        one = torch.ones(num_rows, dtype=torch.int32)
        with self._space.planning(wrapper):
            wrapper.plan(starts, pages, ids[:0], one, *self._heads, self._page_size, causal=True, **self._options)
        heads, sms = self._heads, self._num_sms
        size = num_tokens, num_rows
        return CapturedPrefill(wrapper, self._space, size, pages.numpy(), heads, self._page_size, sms)

    @property
    def works(self) -> WorkList | None:
        """The list that fa3 reads, of up to a piece a block; None: its plan alone writes one."""
        return self._works

    def capture_in_a_row(self, num_tokens: int, works: WorkList, place: torch.Tensor) -> Any:
        """Capture steps of `num_tokens` that read new keys and values alone, by the list at `place` [works.num_bytes]
        uint8; a wrapper of ragged prefills."""
        wrapper = self._space.adopt(self._make_wrapper(CAPTURED_PREFILL.name, True))
        starts = torch.tensor([0, num_tokens], dtype=torch.int32)
        with self._space.planning(wrapper):
            wrapper.plan(starts, starts, *self._heads, causal=True, **self._options)
        wrapper._int_workspace_buffer, wrapper._plan_info = place, works.layout
        return wrapper

    def split_list(self, num_tokens: int, most_rows: int) -> SplitList:
        """The list that fa2 reads of a step of `num_tokens` whose keys are divided among blocks."""
        return SplitList(num_tokens, self._heads, self._page_size, BLOCKS_PER_SM * self._num_sms, most_rows)

    def capture_pages(
        self, num_tokens: int, works: SplitList | WorkList, place: torch.Tensor, page_ids: torch.Tensor
    ) -> Any:
        """Capture steps of `num_tokens` that read what is in pages, by the list at `place` [≥ works.num_bytes] uint8; a
        wrapper of paged prefills.

        Args:
            page_ids: [P] int32, all requests' at each replay.
        """
        if isinstance(works, SplitList):
            kernel, bounds = "fa2", works.bounds(place.view(torch.int32))
        else:  # fa3 reads no more than its list
            nothing = torch.zeros(2, dtype=torch.int32, device=self._device)
            kernel, bounds = CAPTURED_PREFILL.name, [nothing, nothing, nothing[1:]]
        names = "qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_last_page_len_buf"
        buffers = dict(zip(names, bounds, strict=True)) | {"paged_kv_indices_buf": page_ids}
        wrapper = self._space.adopt(self._make_wrapper(kernel, False, use_cuda_graph=True, **buffers))
        # One request has all tokens in FlashInfer's own plan, which tells the wrapper how many there are.
        rows = bounds[2].numel()
        starts = torch.full((rows + 1,), num_tokens, dtype=torch.int32)
        starts[0] = 0
        none, one = torch.zeros(rows + 1, dtype=torch.int32), torch.ones(rows, dtype=torch.int32)
        options = self._options | {"disable_split_kv": True}  # its own sums could be larger than the workspace
        with self._space.planning(wrapper):
            wrapper.plan(starts, none, page_ids[:0], one, *self._heads, self._page_size, causal=True, **options)
        wrapper._int_workspace_buffer, wrapper._plan_info = place, works.layout
        return wrapper

    def _plan(self, kernel: PrefillKernel, prefills: PrefillRows) -> Any:
        wrapper = self._wrapper(kernel.name, prefills.use_ragged)
        starts, options = prefills.qo_indptr_cpu, self._options | {"disable_split_kv": not kernel.splits}
        if prefills.use_ragged and kernel.name == CAPTURED_PREFILL.name:
            self._plan_in_a_row(self._space, wrapper, starts, starts)
            return wrapper
        with self._space.planning(wrapper):
            if prefills.use_ragged:
                wrapper.plan(starts, starts, *self._heads, causal=prefills.causal, **options)
            else:
                view = prefills.pages_of(self._group.params.window_left)
                wrapper.plan(
                    starts,
                    view.indptr_cpu,
                    view.indices,
                    view.last_page_len_cpu,
                    *self._heads,
                    self._page_size,
                    causal=prefills.causal,
                    max_token_per_sequence=int(prefills.query_lens.max()),
                    **options,
                )
        return wrapper

    def _plan_row(self, kernel: PrefillKernel, prefills: PrefillRows, first_slot: int) -> RowPrefill:
        wrapper, starts = self._wrapper(kernel.name, True), prefills.qo_indptr_cpu
        num_keys = int(prefills.prefix_lens[0] + prefills.query_lens[0])
        self._plan_in_a_row(self._space, wrapper, starts, torch.tensor([0, num_keys], dtype=torch.int32))
        return RowPrefill(wrapper, first_slot, num_keys)

    def _plan_copied(
        self, copies: CopySpace, kernel: PrefillKernel, prefills: PrefillRows, slots: torch.Tensor
    ) -> CopiedPrefill:
        wrapper, starts = self._wrapper(kernel.name, True), prefills.qo_indptr_cpu
        ends = np.cumsum(prefills.prefix_lens + prefills.query_lens, dtype=np.int32)
        key_starts = torch.from_numpy(np.concatenate((np.zeros(1, np.int32), ends)))
        self._plan_in_a_row(self._space, wrapper, starts, key_starts)
        return CopiedPrefill(wrapper, copies, slots)

    def _plan_divided(self, merge: Callable[..., None], kernel: PrefillKernel, prefills: PrefillRows) -> DividedPrefill:
        own, starts = self._wrapper(kernel.name, True), prefills.qo_indptr_cpu
        self._plan_in_a_row(self._space, own, starts, starts)
        if self._parts_space is None:
            self._parts_space = PlanSpace(self._device)
        if kernel.in_a_row not in self._parts_wrappers:
            made = self._make_wrapper(kernel.name, kernel.in_a_row)
            self._parts_wrappers[kernel.in_a_row] = self._parts_space.adopt(made)
        before, parts = self._parts_wrappers[kernel.in_a_row], kernel.parts
        new, num_before = int(prefills.query_lens[0]), int(prefills.prefix_lens[0])
        part_starts = torch.arange(parts + 1, dtype=torch.int32) * new
        if kernel.in_a_row and prefills.first_slot is not None:
            bounds = torch.tensor([num_before * part // parts for part in range(parts + 1)], dtype=torch.int32)
            self._plan_in_a_row(self._parts_space, before, part_starts, bounds, causal=False)
            return DividedPrefill(RowPrefill(before, prefills.first_slot, num_before), own, merge, parts)
        with self._parts_space.planning(before):
            view = pages_in_parts(prefills.pages_of(-1), num_before, self._page_size, parts)
            pages = view.indptr_cpu, view.indices, view.last_page_len_cpu
            before.plan(
                part_starts,
                *pages,
                *self._heads,
                self._page_size,
                causal=False,
                max_token_per_sequence=new,
                **self._options,
            )
        return DividedPrefill(before, own, merge, parts)

    def _plan_in_a_row(
        self, space: PlanSpace, wrapper: Any, starts: torch.Tensor, key_starts: torch.Tensor, causal: bool = True
    ) -> None:
        """Plan a wrapper of fa3 over keys in a row; with the same `causal` always.

        Args:
            starts, key_starts: [R + 1] int32: where each request's queries and keys start, on the host.
        """
        with space.planning(wrapper):
            if self._works is not None and id(wrapper) in self._planned:
                pinned, bounds = wrapper._pin_memory_int_workspace_buffer, key_starts.numpy()
                memory = pinned.view(torch.int32).numpy()
                if num_bytes := self._works.write(memory, starts.numpy(), bounds, bounds[1:] - bounds[:-1]):
                    copy_pinned(pinned, wrapper._int_workspace_buffer, num_bytes)
                    wrapper._plan_info, wrapper._qo_indptr_last = self._works.layout, int(starts[-1])
                    return
            wrapper.plan(starts, key_starts, *self._heads, causal=causal, **self._options)
            self._planned.add(id(wrapper))

    def _wrapper(self, kernel: str, use_ragged: bool) -> Any:
        key = (kernel, use_ragged)
        if key not in self._wrappers:
            self._wrappers[key] = self._space.adopt(self._make_wrapper(*key))
        return self._wrappers[key]
