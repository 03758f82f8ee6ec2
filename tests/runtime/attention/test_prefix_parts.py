"""Keys before a chunk in parts, with an attention in plain torch; tests/gpu/test_flashinfer_backend.py has the
kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mllm_compile.runtime.attention.flashinfer.plan import PagedView
from mllm_compile.runtime.attention.flashinfer.prefix_parts import DividedPrefill, pages_in_parts

PAGE_SIZE = 4


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [T, H, D] and logarithms to base 2 of the sums [T, H]."""
    scores = torch.einsum("thd,khd->htk", q, k)
    if causal:
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(1 + len(k) - len(q))
        scores = scores.masked_fill(hidden, -torch.inf)
    sums = scores.logsumexp(-1)
    return torch.einsum("htk,khd->thd", scores.softmax(-1), v), sums.T / torch.log(torch.tensor(2.0))


class OverPages:
    """Requests of equal queries, each over its own pages, without causality."""

    def __init__(self, pages: PagedView, new: int) -> None:
        self.pages, self.new = pages, new

    def run(self, q: torch.Tensor, pages: Any, out: torch.Tensor, lse: torch.Tensor, return_lse: bool) -> None:
        view = self.pages
        for part, last in enumerate(view.last_page_len_cpu.tolist()):
            ids = view.indices[view.indptr_cpu[part] : view.indptr_cpu[part + 1]].long()
            count = (len(ids) - 1) * PAGE_SIZE + last
            k, v = (cached[ids].flatten(0, 1)[:count] for cached in pages)
            rows = slice(part * self.new, (part + 1) * self.new)
            out[rows], lse[rows] = attention(q[rows], k, v, causal=False)


class InARow:
    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: Any, **_: Any) -> None:
        out[:], lse[:] = attention(q, k, v, causal=True)


def merge(out: torch.Tensor, sums: torch.Tensor, other: torch.Tensor, other_sums: torch.Tensor) -> None:
    whole = torch.logaddexp2(sums, other_sums)
    out.mul_(torch.exp2(sums - whole).unsqueeze(-1)).add_(other * torch.exp2(other_sums - whole).unsqueeze(-1))
    sums.copy_(whole)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("before", [13, 16])
def test_parts_add_up_to_the_whole(before: int, parts: int) -> None:
    new, heads, width = 5, 2, 8
    order = torch.randperm(8).int()
    keys, values = torch.randn(2, 8, PAGE_SIZE, heads, width, dtype=torch.float64)
    in_a_row = [cached[order.long()].flatten(0, 1)[: before + new] for cached in (keys, values)]
    q = torch.randn(new, heads, width, dtype=torch.float64)
    expected, _ = attention(q, *in_a_row, causal=True)
    pages = PagedView(torch.tensor([0, 8]), order, torch.tensor([PAGE_SIZE]))
    view = pages_in_parts(pages, before, PAGE_SIZE, parts)
    own = [rows[before:] for rows in in_a_row]
    out = torch.empty_like(q)
    DividedPrefill(OverPages(view, new), InARow(), merge, parts).run(q, *own, (keys, values), out)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
