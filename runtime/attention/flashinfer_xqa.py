"""Decode by FlashInfer's XQA kernels: page table and lengths are read on the device, so that nothing is planned.

A step costs the host two small launches, for any number of requests and whatever the model's depth. Which layers are
served so is flashinfer_kernels.py's decision.

Shape legend: R requests, H query heads, Hk kv heads, D head dim, P pages of a request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from mllm_compile.runtime.attention.flashinfer_kernels import PlanGroup


class XQASpace:
    """What the XQA decodes of one backend share: the page table of the present batch, scratch memory, semaphores."""

    def __init__(
        self,
        groups: Iterable[PlanGroup],
        req_to_token: torch.Tensor,
        max_requests: int,
        page_size: int,
        workspace: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        """
        Args:
            groups: those that XQA serves.
            req_to_token: [rows, columns] int32: the slot of each position.
            workspace: scratch for partial results; shared, as it holds nothing between kernels.
            dtype: of queries and cache.
        """
        from flashinfer.xqa import xqa

        self.attend = xqa
        self._dtype = dtype
        self.page_size = page_size
        self.workspace = workspace
        device = req_to_token.device
        # A kernel leaves its semaphores at zero again.
        num_semaphores = max_requests * max(group.num_kv_heads for group in groups)
        self.semaphores = torch.zeros(num_semaphores, dtype=torch.int32, device=device).view(torch.uint32)
        self._first_slots = req_to_token[:, ::page_size]  # [rows, P]: of each page
        self._page_table = torch.zeros(max_requests, self._first_slots.shape[1], dtype=torch.int32, device=device)
        self._page_shift = int(math.log2(page_size))

    def load(self, group: PlanGroup) -> None:
        """Decode one token of the dummy page, which loads the group's kernel."""
        q = torch.zeros(1, group.num_heads, group.head_dim, dtype=self._dtype, device=self._page_table.device)
        page = q.new_zeros(1, self.page_size, group.num_kv_heads, group.head_dim)
        one = torch.ones(1, dtype=torch.int32, device=q.device)
        self.list_pages(one.long() - 1)
        self.decoder(group, one).run(q, (page, page), torch.empty_like(q))

    def list_pages(self, rows: torch.Tensor) -> None:
        """Make the page table that of the requests in `rows` [R] int64; two launches, nobody waits."""
        table = self._page_table[: rows.shape[0]]
        torch.index_select(self._first_slots, 0, rows, out=table)
        table.bitwise_right_shift_(self._page_shift)

    def decoder(self, group: PlanGroup, seq_lens: torch.Tensor) -> XQADecode:
        """Decodes of the first len(seq_lens) listed requests.

        Args:
            seq_lens: [R] int32, read by the kernel when it runs: at each replay anew if it is captured.
        """
        return XQADecode(self, group, self._page_table[: seq_lens.shape[0]], seq_lens.view(torch.uint32)[:, None])


class XQADecode:
    """Runs as FlashInfer's decode wrappers do, without their plan."""

    def __init__(self, space: XQASpace, group: PlanGroup, page_table: torch.Tensor, seq_lens: torch.Tensor) -> None:
        self._space = space
        self._page_table = page_table  # [R, P] int32
        self._seq_lens = seq_lens  # [R, 1] uint32
        self._num_kv_heads = group.num_kv_heads
        self._q_scale = group.params.sm_scale * math.sqrt(group.head_dim)  # the kernel divides by the root itself

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        """q, out: [R, H, D]; pages: k and v, [pages, page_size, Hk, D]. Writes and returns out."""
        space = self._space
        space.attend(
            q.contiguous()[:, None],  # the kernel knows no strides of q
            *pages,
            self._page_table,
            self._seq_lens,
            out[:, None],
            space.workspace,
            space.semaphores,
            self._num_kv_heads,
            space.page_size,
            q_scale=self._q_scale,
        )
        return out
