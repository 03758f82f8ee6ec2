"""Cascade attention: decodes that begin with the same pages read these once for all of them (FlashInfer's fa2).

All queries of the batch are one request over the shared pages, which they see whole; each is a request of its own over
the pages behind. Both give an output and the logarithm of its sum of exponentials; outputs are merged by it.

Shape legend: R decodes, H query heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mllm_compile.runtime.attention.flashinfer.kernels import PlanGroup
from mllm_compile.runtime.attention.flashinfer.plan import PagedView, PlanSpace


@dataclass(frozen=True)
class CascadeRows:
    """The decodes of a batch.

    Attributes:
        shared: the pages that all of them begin with, as one request's.
        own: those behind, of each.
    """

    shared: PagedView
    own: PagedView


class FlashInferCascade:
    """Runs as a decode wrapper does, planned."""

    def __init__(self, shared: Any, own: Any, merge: Callable[..., None]) -> None:
        self._shared = shared
        self._own = own
        self._merge = merge

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        """q, out: [R, H, D]; pages: k and v, [pages, page_size, Hk, D]. Writes and returns out."""
        log_sums = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
        self._shared.run(q, pages, out=out, lse=log_sums, return_lse=True)
        of_own, own_log_sums = self._own.run(q, pages, return_lse=True)
        self._merge(out, log_sums, of_own, own_log_sums)
        return out


class GroupCascade:
    """The cascades of one plan group."""

    def __init__(
        self,
        make_wrapper: Callable[[], Any],
        merge: Callable[..., None],
        group: PlanGroup,
        page_size: int,
        options: dict[str, Any],
        device: torch.device,
    ) -> None:
        """
        Args:
            make_wrapper: a new BatchPrefillWithPagedKVCacheWrapper of fa2.
            merge: flashinfer.merge_state_in_place.
            options: plan()'s keyword arguments.
        """
        self._merge = merge
        self._sizes = (group.num_heads, group.num_kv_heads, group.head_dim, page_size)
        self._options = options
        self._device = device
        # Both run in one step, so neither may have the other's plan in its place.
        self._shared, self._own = ((space, space.adopt(make_wrapper())) for space in map(PlanSpace, (device, device)))

    def load(self) -> None:
        """Run one token over the dummy page, which loads the kernels."""
        start, one = torch.tensor([0, 1], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        page = PagedView(start, torch.zeros(1, dtype=torch.int32, device=self._device), one)
        num_heads, num_kv_heads, head_dim, page_size = self._sizes
        q = torch.zeros(1, num_heads, head_dim, dtype=self._options["q_data_type"], device=self._device)
        cache = torch.zeros(1, page_size, num_kv_heads, head_dim, device=self._device)
        cache = cache.to(self._options["kv_data_type"])
        self.plan(CascadeRows(page, page)).run(q, (cache, cache), torch.empty_like(q))

    def plan(self, rows: CascadeRows) -> FlashInferCascade:
        """The wrapper for a batch that runs now."""
        count = len(rows.own.last_page_len_cpu)
        self._plan(*self._shared, torch.tensor([0, count], dtype=torch.int32), rows.shared)
        self._plan(*self._own, torch.arange(count + 1, dtype=torch.int32), rows.own)
        return FlashInferCascade(self._shared[1], self._own[1], self._merge)

    def _plan(self, space: PlanSpace, wrapper: Any, starts: torch.Tensor, view: PagedView) -> None:
        # Not causal: the queries follow all shared keys, and of a request's own the last is the query's.
        with space.planning(wrapper):
            pages = (view.indptr_cpu, view.indices, view.last_page_len_cpu)
            wrapper.plan(starts, *pages, *self._sizes, causal=False, **self._options)
