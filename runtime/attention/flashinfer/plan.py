"""The inputs of FlashInfer's plans: page lists per batch, and buffers that a plan may be written to.

A plan is made on the host and copied to the device from pinned memory, without an event of FlashInfer's own. The host
is a step ahead of the GPU, so the next plan would overwrite the pinned bytes before they are copied. PlanSpace hands
out its buffers in turn, and waits for a buffer's copy before it hands it out again.

Shape legend: R requests, P page entries of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mllm_compile.runtime.device.upload import upload

_INT_WORKSPACE_BYTES = 8 << 20  # FlashInfer's own size
_NUM_HOST_BUFFERS = 2


@dataclass(frozen=True)
class PagedView:
    """The pages that each request of a batch reads, those wholly before its window left out."""

    indptr_cpu: torch.Tensor  # [R + 1] int32
    indices: torch.Tensor  # [P] int32, on the device
    last_page_len_cpu: torch.Tensor  # [R] int32, 1 … page_size

    def part(self, start: int, stop: int) -> PagedView:
        """The view of requests start … stop."""
        first, last = int(self.indptr_cpu[start]), int(self.indptr_cpu[stop])
        return PagedView(
            self.indptr_cpu[start : stop + 1] - first, self.indices[first:last], self.last_page_len_cpu[start:stop]
        )


def make_paged_view(
    table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    num_computed_cpu: torch.Tensor,
    window_left: int,
    page_size: int,
    indices_out: torch.Tensor | None = None,
    skipped_pages: int = 0,
) -> PagedView:
    """List the pages of a batch, lengths on the host and page ids gathered on the device, without waiting.

    Leaving out pages before the window keeps positions relative to the end of the request, which is all that a causal
    kernel's mask depends on.

    Args:
        table: [rows, max_context_len] int32: the slot of each position, max_context_len a multiple of page_size; rows
            may overlap.
        rows: [R] int64: the requests' rows of it.
        seq_lens_cpu: [R] int32, each at least 1.
        num_computed_cpu: [R] int32: position of each request's first query.
        indices_out: where to write the page ids, at least P long; a new tensor otherwise.
        skipped_pages: first pages of every request that are left out besides; each has a further one.
    """
    seq_lens = seq_lens_cpu.numpy()
    first_pages = np.full_like(seq_lens, skipped_pages)
    if window_left >= 0:
        first_pages = np.maximum(first_pages, (num_computed_cpu.numpy() - window_left) // page_size)
    num_pages = -(-seq_lens // page_size) - first_pages
    indptr = np.zeros(len(seq_lens) + 1, dtype=np.int32)
    np.cumsum(num_pages, out=indptr[1:])
    total = int(indptr[-1])

    # Entry j of the list, in request i, is column (first_pages[i] + j - indptr[i]) * page_size of the table.
    columns = (first_pages - indptr[:-1]).astype(np.int64) * page_size
    offsets, counts = upload(np.stack((columns, num_pages.astype(np.int64))), table.device)
    starts = rows * table.stride(0) + offsets
    entries = torch.repeat_interleave(starts, counts, output_size=total)
    entries += torch.arange(0, total * page_size, page_size, device=table.device)
    indices = torch.empty(total, dtype=torch.int32, device=table.device) if indices_out is None else indices_out[:total]
    slots = table.as_strided(((len(table) - 1) * table.stride(0) + table.shape[1],), (1,))
    torch.floor_divide(slots.index_select(0, entries), page_size, out=indices)
    return PagedView(
        indptr_cpu=torch.from_numpy(indptr),
        indices=indices,
        last_page_len_cpu=torch.from_numpy((seq_lens - 1) % page_size + 1),
    )


class PlanSpace:
    """The buffers that plans of one kind are written to: one on the device, pinned ones in turn; see the header.

    Wrappers that never run in the same step may share one: the device orders a new plan behind the kernels that read
    the last one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device_buffer = torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._host_buffers = [
            torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_NUM_HOST_BUFFERS)
        ]
        self._copied = [torch.cuda.Event() for _ in range(_NUM_HOST_BUFFERS)]
        self._turn = 0

    def adopt(self, wrapper: Any) -> Any:
        """Give a FlashInfer wrapper this space in place of the buffers that it allocated for itself."""
        wrapper._int_workspace_buffer = self._device_buffer
        wrapper._pin_memory_int_workspace_buffer = self._host_buffers[0]
        return wrapper

    @contextmanager
    def planning(self, wrapper: Any) -> Iterator[None]:
        """Encloses `wrapper.plan(…)`: gives it pinned bytes that no queued copy reads."""
        self._turn = (self._turn + 1) % _NUM_HOST_BUFFERS
        copied = self._copied[self._turn]
        copied.synchronize()  # at once when never recorded
        wrapper._pin_memory_int_workspace_buffer = self._host_buffers[self._turn]
        yield
        copied.record()
