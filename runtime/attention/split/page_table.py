"""The pages of the present batch's requests, as kernels of the program read them."""

from __future__ import annotations

import torch


class PageTable:
    """A row of pages for each request of a batch.

    Attributes:
        pages: [max requests, W] int32, one row for each listed request.
    """

    def __init__(self, req_to_token: torch.Tensor, max_requests: int, page_size: int) -> None:
        """
        Args:
            req_to_token: [rows, columns] int32: the slot of each position.
        """
        self._page_size = page_size
        self._first_slots = req_to_token[:, ::page_size]  # [rows, W]: of each page
        self.pages = torch.zeros(
            max_requests, self._first_slots.shape[1], dtype=torch.int32, device=req_to_token.device
        )

    def list(self, rows: torch.Tensor) -> None:
        """Write the page table of the requests in `rows` [R] int64; two launches, no wait."""
        table = self.pages[: rows.shape[0]]
        torch.index_select(self._first_slots, 0, rows, out=table)
        table.div_(self._page_size, rounding_mode="floor")
