"""Images whose tokens see each other in both directions, in a step's prefills.

The prefills of the whole step run as causal, which is right for all other tokens. Then images' rows are computed once
more and overwritten: each image is a request whose keys end with it, without causality. A window reaches back from each
token, as in the causal kernels.

Shape legend: T tokens, B tokens of images, H query heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from mllm_compile.runtime.attention.flashinfer.kernels import PlanGroup
from mllm_compile.runtime.attention.flashinfer.plan import make_paged_view
from mllm_compile.runtime.attention.flashinfer.prefill import GroupPrefill, PrefillRows
from mllm_compile.runtime.attention.flashinfer.sinks import run_with_sinks
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.forward_batch import Block, ForwardBatch


class ImageBlocks:
    """The blocks of the current step. Made when the first step has some, as few models have any."""

    def __init__(self, make: Callable[[PlanGroup], GroupPrefill], groups: Sequence[PlanGroup], page_size: int) -> None:
        """
        Args:
            make: gives a group's wrappers, with buffers of their own: they run in the same step as its other prefills.
        """
        self._prefills = [make(group) for group in groups]
        self._page_size = page_size
        self._rows: torch.Tensor | None = None  # [B] int64, of T
        self._wrappers: list[Any] = []

    def plan(self, batch: ForwardBatch, blocks: Sequence[Block], table: torch.Tensor) -> None:
        """Plan the blocks of a batch.

        Args:
            table: [rows, max_context_len] int32, the slot of each position.
        """
        lengths = np.array([block.end - block.start for block in blocks], dtype=np.int32)
        ends = np.array([block.seq_len for block in blocks], dtype=np.int32)
        places = np.array([block.request for block in blocks], dtype=np.int64)
        requests = batch.req_pool_indices.index_select(0, upload(places, table.device))
        starts = np.zeros(len(blocks) + 1, dtype=np.int32)
        np.cumsum(lengths, out=starts[1:])
        seq_lens, computed = torch.from_numpy(ends), torch.from_numpy(ends - lengths)
        rows = PrefillRows(
            torch.from_numpy(starts),
            lengths,
            ends - lengths,
            use_ragged=False,
            pages_of=lambda window: make_paged_view(table, requests, seq_lens, computed, window, self._page_size),
            seq_lens=batch.seq_lens,
            first_tokens=starts,
            causal=False,
        )
        self._wrappers = [prefill.plan(rows) for prefill in self._prefills]
        of_rows = [np.arange(block.start, block.end, dtype=np.int64) for block in blocks]
        self._rows = upload(np.concatenate(of_rows), table.device)

    def run(
        self,
        group: int,
        q: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        layer: AttentionLayer,
    ) -> None:
        """Writes the blocks' rows of `out` [T, H, D], of q [T, H, D] and a layer's pages."""
        if self._rows is None:
            raise RuntimeError("call plan with the batch before run")
        queries = q.index_select(0, self._rows)
        attended = torch.empty_like(queries)
        run_with_sinks(self._wrappers[group], queries, pages, out=attended, sinks=layer.sink_logits)
        out.index_copy_(0, self._rows, attended)
