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
    prefill_kernels,
)
from mllm_compile.runtime.attention.flashinfer_plan import PagedView, PlanSpace

# (flashinfer's kernel, whether it reads new keys and values and no pages) → a new wrapper
WrapperMaker = Callable[[str, bool], Any]


@dataclass(frozen=True)
class PrefillRows:
    """The prefills of a batch."""

    qo_indptr_cpu: torch.Tensor  # [R + 1] int32: where each one's new tokens start
    query_lens: np.ndarray  # [R] int32: new tokens
    prefix_lens: np.ndarray  # [R] int32: tokens before them
    use_ragged: bool  # keys and values are read as they come, not from the pages
    pages_of: Callable[[int], PagedView]  # window_left → their pages


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
