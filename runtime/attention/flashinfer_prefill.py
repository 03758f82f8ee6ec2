"""Prefills of one plan group, by FlashInfer's wrappers: planned on the host for every batch, run per layer.

Which kernel a batch gets is decided in flashinfer_kernels.py.

Shape legend: R requests with prefills.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mllm_compile.runtime.attention.flashinfer_kernels import (
    PlanGroup,
    PrefillKernel,
    choose_prefill_kernel,
    prefill_costs,
    prefill_kernels,
)
from mllm_compile.runtime.attention.flashinfer_plan import PagedView, PlanSpace

# (flashinfer's kernel, whether it reads new keys and values and no pages, further arguments by name) → a new wrapper
WrapperMaker = Callable[..., Any]


@dataclass(frozen=True)
class PrefillRows:
    """The prefills of a batch."""

    qo_indptr_cpu: torch.Tensor  # [R + 1] int32: where each one's new tokens start
    query_lens: np.ndarray  # [R] int32: new tokens
    prefix_lens: np.ndarray  # [R] int32: tokens before them
    use_ragged: bool  # keys and values are read as they come, not from the pages
    pages_of: Callable[[int], PagedView]  # window_left → their pages


_CAPTURED = PrefillKernel("fa3", splits=False)


class CapturedPrefill:
    """A wrapper of fa3 in a captured step: see mixed_steps.py."""

    def __init__(self, wrapper: Any, space: PlanSpace, sizes: tuple[int, ...], pages: torch.Tensor) -> None:
        """
        Args:
            sizes: tokens, rows, heads, KV heads, head dim, page size.
            pages: [R + 1] int32 on the host: where each row's page ids start.
        """
        self._wrapper = wrapper
        self._space = space
        self._num_tokens, self._num_rows, *self._heads, self._head_dim, self._page_size = sizes
        self._pages = pages
        self._layout = list(wrapper._plan_info)

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        """q, out: [T, H, D]; pages: k and v, [pages, page_size, Hk, D]. Writes and returns out."""
        return self._wrapper.run(q, pages, out=out)

    def plan(self, starts: torch.Tensor, num_keys: torch.Tensor) -> None:
        """By the kernel's own plan: the wrapper's takes a millisecond for 256 rows, of which the kernel reads nothing.

        Args:
            starts: [R + 1] int32: the first token of each row; num_keys: [R] int32. On the host.

        Raises:
            RuntimeError: the plan lies elsewhere than the captured kernel reads it.
        """
        wrapper = self._wrapper
        with self._space.planning(wrapper):
            layout = wrapper._cached_module.plan(
                wrapper._float_workspace_buffer,
                wrapper._int_workspace_buffer,
                wrapper._pin_memory_int_workspace_buffer,
                starts,
                self._pages,
                num_keys,
                self._num_tokens,
                self._num_rows,
                *self._heads,
                self._page_size,
                True,  # for a CUDA graph
                self._head_dim,
                self._head_dim,
                True,  # causal
                -1,  # no window
            )
        if list(layout) != self._layout:
            raise RuntimeError(f"FlashInfer's plan has moved from {self._layout} to {list(layout)}")


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
    ) -> None:
        """
        Args:
            options: plan()'s keyword arguments.
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
        self._is_hopper = properties.major == 9
        self._space = PlanSpace(device)
        self._wrappers: dict[tuple[str, bool], Any] = {}

    def load(self) -> None:
        """Plan one token of one page with each kernel: no request waits for one to be loaded, or compiled."""
        start, one = torch.tensor([0, 1], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        page = PagedView(start, torch.zeros(1, dtype=torch.int32, device=self._device), one)
        token = PrefillRows(start, one.numpy(), one.numpy() - 1, use_ragged=False, pages_of=lambda window_left: page)
        # A kernel of one name is the same library for pages and for new tokens alone, split or not.
        for name in prefill_kernels(self._group, self._kv_cache_dtype, self._is_hopper):
            self._plan(PrefillKernel(name, splits=False), token)

    def plan(self, prefills: PrefillRows) -> Any:
        """The wrapper for a batch that runs now."""
        lengths = prefills.query_lens, prefills.prefix_lens
        kernel = choose_prefill_kernel(self._group, self._kv_cache_dtype, *lengths, self._num_sms, self._is_hopper)
        return self._plan(kernel, prefills)

    @property
    def can_be_captured(self) -> bool:
        """fa3 alone launches the same blocks for every batch, and reads nothing else than its plan and page ids."""
        return "fa3" in prefill_kernels(self._group, self._kv_cache_dtype, self._is_hopper)

    def captured_loss_us(self, query_lens: np.ndarray, prefix_lens: np.ndarray) -> float:
        """How much longer the captured kernel takes for such prefills than the fastest, as estimated.

        Args:
            query_lens, prefix_lens: [R]; there may be no prefills.
        """
        if not query_lens.size:
            return 0.0
        lengths = query_lens, prefix_lens
        costs = prefill_costs(self._group, self._kv_cache_dtype, *lengths, self._num_sms, self._is_hopper)
        return costs[_CAPTURED] - min(costs.values())

    def capture(self, num_tokens: int, page_table: torch.Tensor) -> CapturedPrefill:
        """For steps of `num_tokens`, whose requests' page ids are the rows of `page_table` [R, W] int32."""
        num_rows, num_pages = page_table.shape
        sizes, ids = torch.zeros(num_rows + 1, dtype=torch.int32, device=self._device), page_table.flatten()
        buffers = {
            "qo_indptr_buf": sizes,
            "paged_kv_indptr_buf": sizes,
            "paged_kv_indices_buf": ids,
            "paged_kv_last_page_len_buf": sizes[1:],
        }
        wrapper = self._space.adopt(self._make_wrapper(_CAPTURED.name, False, use_cuda_graph=True, **buffers))
        # One request has all tokens in FlashInfer's own plan, which tells the wrapper how many there may be.
        starts = torch.full((num_rows + 1,), num_tokens, dtype=torch.int32)
        starts[0] = 0
        pages = torch.arange(num_rows + 1, dtype=torch.int32) * num_pages
        one = torch.ones(num_rows, dtype=torch.int32)
        with self._space.planning(wrapper):
            wrapper.plan(starts, pages, ids[:0], one, *self._heads, self._page_size, causal=True, **self._options)
        return CapturedPrefill(wrapper, self._space, (num_tokens, num_rows, *self._heads, self._page_size), pages)

    def _plan(self, kernel: PrefillKernel, prefills: PrefillRows) -> Any:
        wrapper = self._wrapper(kernel.name, prefills.use_ragged)
        starts, options = prefills.qo_indptr_cpu, self._options | {"disable_split_kv": not kernel.splits}
        with self._space.planning(wrapper):
            if prefills.use_ragged:
                wrapper.plan(starts, starts, *self._heads, causal=True, **options)
            else:
                view = prefills.pages_of(self._group.params.window_left)
                wrapper.plan(
                    starts,
                    view.indptr_cpu,
                    view.indices,
                    view.last_page_len_cpu,
                    *self._heads,
                    self._page_size,
                    causal=True,
                    max_token_per_sequence=int(prefills.query_lens.max()),
                    **options,
                )
        return wrapper

    def _wrapper(self, kernel: str, use_ragged: bool) -> Any:
        key = (kernel, use_ragged)
        if key not in self._wrappers:
            self._wrappers[key] = self._space.adopt(self._make_wrapper(*key))
        return self._wrappers[key]
