"""A batch as layers with a state see it: whose tokens are where, and whose state begins.

Decodes come first: one token each, all of them one step. The other requests are segments of several tokens, or of one
that is the first of its prompt. Shape legend: T tokens, R requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from mllm_compile.runtime.attention.metadata import CommonAttentionMetadata, split_decodes_and_prefills
from mllm_compile.runtime.state.mixed import MixedStates, PromptRows

if TYPE_CHECKING:
    from mllm_compile.runtime.forward_batch import ForwardBatch
    from mllm_compile.runtime.runner_config import RunnerConfig
    from mllm_compile.runtime.state.layer import StateLayer


class Segment(NamedTuple):
    """The new tokens of one request: [start, end) of T."""

    request: int  # index into `rows`
    start: int
    end: int
    has_state: bool  # else these are its first tokens


@dataclass(frozen=True, kw_only=True)
class StateMetadata:
    """`attn_metadata[layer]` of a layer with a state.

    Attributes:
        batch: the batch; its `attn_backend` computes the layer.
        rows: [R] int64, on the device: each request's row of GDNPool. Row 0 is padding's and never has a state.
        num_decodes: the first of R, one token each.
        segments: the others, as the host knows them.
        num_actual_tokens: T without padding.
        are_runs: tokens are rows of their own, and a request's rows follow each other, as in the deterministic mode on
            a GPU: only the device knows how many a request has.
        mixed: of a captured step with prompts, or a verify step, what kernels read in place of the rest.
        num_held_tokens: first tokens, of segments that leave no state (held.py).
    """

    batch: ForwardBatch
    rows: torch.Tensor
    num_decodes: int
    segments: Sequence[Segment]
    num_actual_tokens: int
    are_runs: bool = False
    mixed: MixedStates | None = None
    num_held_tokens: int = 0

    @cached_property
    def has_state(self) -> torch.Tensor:
        """[R] bool, on the device: the request has computed tokens before these. Of padding it says nothing."""
        batch = self.batch
        if batch.extend_prefix_lens is None:
            return batch.seq_lens > 1
        return batch.extend_prefix_lens > 0

    @cached_property
    def query_start_loc(self) -> torch.Tensor:
        """[R + 1] int32, on the device: tokens of request i are [i] … [i + 1]."""
        batch, rows = self.batch, self.rows
        if batch.extend_seq_lens is None:
            return torch.arange(rows.shape[0] + 1, dtype=torch.int32, device=rows.device)
        starts = torch.zeros(rows.shape[0] + 1, dtype=torch.int32, device=rows.device)
        torch.cumsum(batch.extend_seq_lens, 0, dtype=torch.int32, out=starts[1:])
        return starts

    @cached_property
    def of_decodes(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(rows, has_state) of the decodes, or None."""
        if self.mixed is not None:
            return self.mixed.of_decodes
        if not self.num_decodes:
            return None
        return self.rows[: self.num_decodes], self.has_state[: self.num_decodes]

    @cached_property
    def of_prompts(self) -> PromptRows | None:
        """The tensors that kernels read of the others, or None."""
        if self.mixed is not None:
            return self.mixed.of_prompts
        if self.num_decodes == self.rows.shape[0]:
            return None
        if self.are_runs:
            return PromptRows(self.rows, self.has_state, self.rows, *self._bounds_of_runs)
        first, bounds = self.num_decodes, self.query_start_loc
        parts = self.rows[first:], self.has_state[first:], bounds[first:-1], bounds[first + 1 :]
        # Of their own: a package copies, in every layer, an input that does not begin at a multiple of 16 bytes.
        rows, has_state, starts, ends = (part.clone() for part in parts)
        return PromptRows(rows, has_state, rows, starts, ends)

    @property
    def _bounds_of_runs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(starts, ends), [R] int32: a request's first row has all of its tokens, its others and padding have none."""
        rows, places = self.rows, torch.arange(self.rows.shape[0] + 1, dtype=torch.int32, device=self.rows.device)
        starts = places[:-1]
        begins = torch.cat((places[:1] == 0, rows[1:] != rows[:-1]))
        behind = torch.cat((torch.where(begins, starts, rows.shape[0])[1:], places[-1:]))
        ends = behind.flip(0).cummin(0).values.flip(0)  # the next beginning
        return starts, torch.where(begins & (rows > 0), ends, starts)


class StateMetadataBuilder:
    """Makes the metadata of a batch for all layers with a state."""

    def __init__(self, layers: Sequence[StateLayer], config: RunnerConfig, rows_of_others: int = 0) -> None:
        """
        Args:
            rows_of_others: rows of requests of other ranks ahead of this rank's own, which alone have states here.
        """
        self._rows_of_others = rows_of_others
        self._names = [layer.name for layer in layers]
        self._is_deterministic = config.runtime.deterministic

    def build(self, common: CommonAttentionMetadata, is_mixed: bool = False) -> dict[str, StateMetadata]:
        """Layer name → metadata, the same object for every layer; {} for a model without such layers.

        Args:
            is_mixed: the step is captured with prompts, whose kernels read MixedStates.
        """
        if not self._names:
            return {}
        num_decodes = 0 if self._is_deterministic else split_decodes_and_prefills(common)[0]
        are_runs = self._is_deterministic and common.batch.req_pool_indices.is_cuda
        segments: list[Segment] = []
        if not are_runs:
            segments = _segments_of_rows(common) if self._is_deterministic else _segments(common, num_decodes)
        metadata = StateMetadata(
            batch=common.batch,
            rows=self._own_rows(common.batch.req_pool_indices),
            num_decodes=num_decodes,
            segments=segments,
            num_actual_tokens=common.num_actual_tokens,
            are_runs=are_runs,
            num_held_tokens=common.batch.num_verify_tokens,
        )
        if not is_mixed and metadata.rows.is_cuda:
            # Made now, ahead of the model: kernels of states read these before the kernel right ahead has ended.
            _ = metadata.of_decodes, metadata.of_prompts
        return dict.fromkeys(self._names, metadata)

    def _own_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows as GDNPool has them; padding's is 0 there too."""
        return (rows - self._rows_of_others).clamp(min=0) if self._rows_of_others else rows


def _segments(common: CommonAttentionMetadata, num_decodes: int) -> list[Segment]:
    starts, computed = common.query_start_loc_cpu.tolist(), common.num_computed_tokens_cpu.tolist()
    requests = range(num_decodes, common.num_reqs)
    return [Segment(index, starts[index], starts[index + 1], computed[index] > 0) for index in requests]


def _segments_of_rows(common: CommonAttentionMetadata) -> list[Segment]:
    """Segments of a step that the deterministic mode has made decodes of: tokens of one request follow each other, a
    row each (step/plan.py). On a CPU alone, where looking at rows waits for nobody; rows of padding are left out."""
    rows, starts = common.batch.req_pool_indices.numpy(), common.query_start_loc_cpu.tolist()
    firsts = np.flatnonzero(np.diff(rows, prepend=-1)).tolist()
    computed = common.num_computed_tokens_cpu.tolist()
    return [
        Segment(first, starts[first], starts[end], computed[first] > 0)
        for first, end in zip(firsts, [*firsts[1:], len(rows)], strict=True)
        if rows[first]
    ]
