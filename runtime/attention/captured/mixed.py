"""Attention of captured steps with prompts: one capture serves whatever decodes and prompts make up so many tokens, of
one kind or of both.

All that depends on the batch is read on the device. The decode kernels of the program (split_decode.py) read each row's
length, 0 where the row is no decode, and its pages. FlashInfer's fa3 reads page ids and the list of work that its plan
writes into the int workspace. It reads nothing else of a batch, not even its wrapper's offsets (0.6.18). So its page
ids are the decode kernels' page table, each request's at its own row. That table is made within the capture for the
most requests; or, if this takes the GPU long, by two launches ahead of a replay for the actual ones. Beside that a
replay costs at most two for the decodes' lengths, and a plan.

Decodes come first in a batch, prompts behind them. The decodes' kernels skip rows past the decodes, the prompts'
kernels skip rows before the prompts, and both skip padding.

Shape legend: T tokens of a captured step, R requests that it may have, W pages of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mllm_compile.runtime.attention.capture import CapturesMixed
from mllm_compile.runtime.attention.flashinfer.decode import DecodeBatch, SplitGroup
from mllm_compile.runtime.attention.flashinfer.planned import DecodeMetadata, Planned, PrefillMetadata
from mllm_compile.runtime.attention.flashinfer.prefill import CapturedPrefill, GroupPrefill
from mllm_compile.runtime.attention.metadata import CommonAttentionMetadata
from mllm_compile.runtime.attention.split.split_decode import SplitDecodeSpace
from mllm_compile.runtime.forward_batch import ForwardBatch

# Entries of a page table that a capture makes: less than 10 µs.
_MOST_LISTED = 2**18


@dataclass(frozen=True)
class MixedStep:
    """A captured step of T tokens.

    Attributes:
        num_rows: R.
        lists_pages: the capture makes the page table.
        decodes: the decodes' kernels, one a plan group.
        prefills: likewise of the prompts.
    """

    num_rows: int
    lists_pages: bool
    decodes: list[Any]
    prefills: list[CapturedPrefill]


class MixedSteps:
    """The captured steps of one backend."""

    def __init__(
        self,
        decodes: Sequence[SplitGroup],
        prefills: Sequence[GroupPrefill],
        space: SplitDecodeSpace,
        max_requests: int,
        device: torch.device,
    ) -> None:
        """
        Args:
            decodes, prefills: one a plan group, in the same order.
            space: the decodes' space.
        """
        self._decodes = decodes
        self._prefills = prefills
        self._space = space
        self._decode_lens = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self._num_decodes = 0  # of the last replay: lengths behind them are 0
        self._steps: dict[int, MixedStep] = {}

    def capture(self, num_tokens: int) -> MixedStep:
        """Makes a step of `num_tokens` to capture: nothing but padding, until `replay`."""
        num_rows = min(num_tokens, self._decode_lens.shape[0])
        rows = DecodeBatch(self._decode_lens[:num_rows], _no_pages)
        step = MixedStep(
            num_rows,
            num_rows * self._space.page_table.shape[1] <= _MOST_LISTED,
            [group.plan(rows) for group in self._decodes],
            [group.capture(num_tokens, self._space.page_table[:num_rows]) for group in self._prefills],
        )
        nothing = np.zeros(1, dtype=np.int32)
        for prefill in step.prefills:
            prefill.plan(nothing, nothing[1:])
        self._steps[num_tokens] = step
        return step

    def holds(self, num_tokens: int) -> bool:
        """True if a captured step has room for so many tokens."""
        return num_tokens <= max(self._steps, default=0)

    def begin(self, num_tokens: int, rows: torch.Tensor) -> None:
        """Put on the stream what a captured step of `num_tokens` begins with.

        Args:
            rows: [≥ R] int64, the requests' rows of the table of slots at each replay, 0 of padding.
        """
        step = self._steps[num_tokens]
        if step.lists_pages:
            self._space.list_pages(rows[: step.num_rows])

    def replay(self, num_tokens: int, batch: CommonAttentionMetadata, rows: torch.Tensor) -> MixedStep:
        """Fill the captured step of `num_tokens` with `batch`, without waiting.

        Args:
            rows: [≥ requests] int64, their rows of the table of slots.
        """
        step = self._steps[num_tokens]
        if not step.lists_pages:
            self._space.list_pages(rows[: batch.num_reqs])
        first = batch.num_decodes
        self._set_decode_lens(batch.seq_lens[:first])
        starts, num_keys = batch.query_start_loc_cpu.numpy()[first:], batch.seq_lens_cpu.numpy()[first:]
        for prefill in step.prefills:
            prefill.plan(starts, num_keys, first)
        return step

    def _set_decode_lens(self, seq_lens: torch.Tensor) -> None:
        num_decodes = seq_lens.shape[0]
        if num_decodes < self._num_decodes:
            self._decode_lens[num_decodes : self._num_decodes].zero_()
        if num_decodes:
            self._decode_lens[:num_decodes].copy_(seq_lens)
        self._num_decodes = num_decodes


def _no_pages(window_left: int, indices_out: torch.Tensor | None) -> Any:
    raise RuntimeError("the program's own decode kernels list no pages")


class CapturedMixed(CapturesMixed):
    """A backend's captured steps with prompts."""

    def __init__(self, steps: MixedSteps, prefills: Sequence[GroupPrefill], planned: Planned) -> None:
        """
        Args:
            prefills: the steps'.
            planned: the backend's.
        """
        self.steps = steps
        self._prefills = prefills
        self._planned = planned

    def runs_well_captured(self, batch: ForwardBatch) -> bool:
        common = CommonAttentionMetadata.of(batch)
        prefix_lens = common.num_computed_tokens_cpu.numpy()[common.num_decodes :]
        query_lens = common.seq_lens_cpu.numpy()[common.num_decodes :] - prefix_lens
        first_slot = batch.first_slot if len(prefix_lens) == 1 else None
        return all(group.runs_well_captured(query_lens, prefix_lens, first_slot) for group in self._prefills)

    def init_forward_metadata_capture_mixed(self, num_tokens: int) -> None:
        self._take(self.steps.capture(num_tokens))

    def begin_captured_mixed(self, num_tokens: int, rows: torch.Tensor) -> None:
        self.steps.begin(num_tokens, rows)

    def init_forward_metadata_replay_mixed(self, num_tokens: int, batch: ForwardBatch) -> None:
        self._take(self.steps.replay(num_tokens, CommonAttentionMetadata.of(batch), batch.req_pool_indices))

    def _take(self, step: MixedStep) -> None:
        """Rows of decode kernels that are not decodes have no keys."""
        prefills = PrefillMetadata(step.prefills, use_ragged=False)
        self._planned.set(DecodeMetadata(step.decodes), prefills, step.num_rows)
