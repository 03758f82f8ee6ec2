"""A long prompt's chunk whose earlier keys are divided into parts, which blocks of their own read.

fa3 has a block for 128 queries of a head, and none of its blocks share keys. A chunk of 256 tokens of 32 heads makes 64
blocks: behind 30,000 tokens they take as long as twice as many would, and half of the GPU has nothing to do. So each
    part of the keys is a request of its own with a copy of the queries, which see it whole. The chunk's own keys are
    one more request, seen causally. Results are merged by their sums of exponentials.

Shape legend: T new tokens of the prompt, N parts, H query heads, Hk KV heads, D head dim, S tokens of a page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mllm_compile.runtime.attention.flashinfer.plan import PagedView


class DividedPrefill:
    """The prefill of one prompt, planned."""

    def __init__(self, before: Any, own: Any, merge: Callable[..., None], parts: int) -> None:
        """
        Args:
            before: a wrapper over pages, planned for `parts` requests of T queries each, without causality.
            own: a wrapper over keys in a row, planned for the new tokens alone.
            merge: flashinfer.merge_state_in_place.
        """
        self._before = before
        self._own = own
        self._merge = merge
        self._parts = parts

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """Writes `out` [T, H, D]; q: [T, H, D]; k, v: [T, Hk, D] of the new tokens; pages: [pages, S, Hk, D] each."""
        shape = (self._parts, *q.shape)
        queries = torch.empty(shape, dtype=q.dtype, device=q.device).copy_(q)
        outs, log_sums = torch.empty_like(queries), q.new_empty(shape[:-1], dtype=torch.float32)
        own_log_sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        flat = queries.flatten(0, 1), outs.flatten(0, 1), log_sums.flatten(0, 1)
        self._before.run(flat[0], pages, out=flat[1], lse=flat[2], return_lse=True)
        self._own.run(q, k, v, out=out, lse=own_log_sums, return_lse=True)
        for part, log_sum in zip(outs, log_sums, strict=True):
            self._merge(out, own_log_sums, part, log_sum)


def pages_in_parts(pages: PagedView, num_tokens: int, page_size: int, parts: int) -> PagedView:
    """The first `num_tokens` tokens of one request's pages as `parts` requests, in whole pages except the last."""
    count = -(-num_tokens // page_size)
    bounds = [count * part // parts for part in range(parts + 1)]
    last = torch.full((parts,), page_size, dtype=torch.int32)
    last[-1] = (num_tokens - 1) % page_size + 1
    return PagedView(torch.tensor(bounds, dtype=torch.int32), pages.indices[:count], last)
