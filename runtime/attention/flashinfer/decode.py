"""Decodes of one plan group: by FlashInfer's planned wrappers, or by the program's own pieces, which need no plan.

The backend asks a group for a wrapper (`run(q, pages, out=…)`) per batch, or per captured batch size. A captured
kernel's inputs stay in place; only their contents change.

Shape legend: R requests, P page entries of a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from mllm_compile.runtime.attention.flashinfer.kernels import PlanGroup
from mllm_compile.runtime.attention.flashinfer.plan import PagedView, PlanSpace
from mllm_compile.runtime.attention.hopper.shapes import pays_together
from mllm_compile.runtime.attention.split.split_decode import LinkedDecodes, SplitDecode, SplitDecodeSpace
from mllm_compile.runtime.device.upload import upload

# (window_left, where to write the page ids or None) → the pages of the batch's decodes
PageLister = Callable[[int, torch.Tensor | None], PagedView]


@dataclass(frozen=True)
class DecodeBatch:
    """The decodes of a batch; pages are listed only for groups that need the list."""

    seq_lens: torch.Tensor  # [R] int32, on the device
    list_pages: PageLister
    behind_writes: bool = False  # a row may have keys of the same step beside its own


@dataclass(frozen=True)
class GraphBuffers:
    """The buffers that the planned kernels of one group's captured batches read."""

    kv_indices: torch.Tensor  # [≥ P] int32
    kv_indptr: torch.Tensor  # [max R + 1] int32
    last_page_len: torch.Tensor  # [max R] int32


class GroupDecode(ABC):
    """One plan group's decodes."""

    @abstractmethod
    def load(self) -> None:
        """Load the kernel, or build it, so that no request waits for that."""

    @abstractmethod
    def plan(self, decodes: DecodeBatch) -> Any:
        """The wrapper for a batch that runs now."""

    @abstractmethod
    def plan_capture(self, bs: int, seq_lens: torch.Tensor, buffers: GraphBuffers) -> Any:
        """The wrapper for a capture of `bs` rows, planned for rows of one token on the dummy page."""

    @abstractmethod
    def plan_replay(self, bs: int, decodes: DecodeBatch) -> Any:
        """The captured wrapper, made ready for these requests."""


class SplitGroup(GroupDecode):
    """Decodes with the program's own kernels (split_decode.py), also attention/hopper/, which does not split keys that
    way. They read the page table that the backend keeps for all such groups."""

    def __init__(
        self, group: PlanGroup, decoders: LinkedDecodes, verifiers: LinkedDecodes, space: SplitDecodeSpace
    ) -> None:
        """
        Args:
            verifiers: of captured verify steps, each for some number of tokens a request.
        """
        self._group = group
        self._decoders = decoders
        self._verifiers = {verifier.tokens: verifier for verifier in verifiers}
        self._space = space
        self._captured: dict[int, tuple[torch.Tensor, SplitDecode]] = {}

    def load(self) -> None:
        self._space.load(self._group, self._decoders)

    def plan(self, decodes: DecodeBatch) -> SplitDecode:
        return self._space.prepare(self._group, self._decoders, decodes.seq_lens, decodes.behind_writes)

    def plan_verify(self, num_tokens: int, seq_lens: torch.Tensor) -> SplitDecode:
        """The wrapper for rows of a verify step, `num_tokens` of each request: they are attended together, or each as a
        decode behind the write of all keys."""
        verifier = self._verifiers.get(num_tokens)
        num_sequences = len(seq_lens) // num_tokens * self._group.num_kv_heads
        if verifier is None or not pays_together(num_sequences, num_tokens):
            return self._space.prepare(self._group, self._decoders, seq_lens, behind_writes=True)
        return self._space.prepare(self._group, [replace(verifier, most_sequences=None)], seq_lens)

    def plan_capture(self, bs: int, seq_lens: torch.Tensor, buffers: GraphBuffers) -> SplitDecode:
        decoder = self._space.prepare(self._group, self._decoders, seq_lens)
        self._captured[bs] = seq_lens, decoder
        return decoder

    def plan_replay(self, bs: int, decodes: DecodeBatch) -> SplitDecode:
        seq_lens, decoder = self._captured[bs]
        if decodes.seq_lens.data_ptr() != seq_lens.data_ptr():
            seq_lens.copy_(decodes.seq_lens)
        return decoder


class PlannedGroup(GroupDecode):
    """FlashInfer's decode wrappers, on CUDA cores or tensor cores, planned on the host for every batch."""

    def __init__(
        self,
        make_wrapper: Callable[..., Any],
        group: PlanGroup,
        page_size: int,
        options: dict[str, Any],
        device: torch.device,
        never_split: bool,
    ) -> None:
        """
        Args:
            make_wrapper: a new BatchDecodeWithPagedKVCacheWrapper with these keyword arguments more.
            options: plan()'s keyword arguments.
            never_split: one block for all keys of a request. Captured batches cannot be told so: see
                flashinfer_kernels.check_never_split.
        """
        self._make_wrapper = make_wrapper
        self._window_left = group.params.window_left
        self._sizes = (group.num_heads, group.num_kv_heads, group.head_dim, page_size)
        self._options = options
        self._device = device
        self._never_split = never_split
        self._space = PlanSpace(device)
        self._wrapper = self._space.adopt(make_wrapper())
        self._captured: dict[int, tuple[Any, GraphBuffers]] = {}

    def load(self) -> None:
        page = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._plan(self._wrapper, _dummy_pages(1, page))

    def plan(self, decodes: DecodeBatch) -> Any:
        self._plan(self._wrapper, decodes.list_pages(self._window_left, None))
        return self._wrapper

    def plan_capture(self, bs: int, seq_lens: torch.Tensor, buffers: GraphBuffers) -> Any:
        wrapper = self._space.adopt(
            self._make_wrapper(
                use_cuda_graph=True,
                paged_kv_indptr_buffer=buffers.kv_indptr[: bs + 1],
                paged_kv_indices_buffer=buffers.kv_indices,
                paged_kv_last_page_len_buffer=buffers.last_page_len[:bs],
            )
        )
        self._plan(wrapper, _dummy_pages(bs, torch.zeros(bs, dtype=torch.int32)))
        self._captured[bs] = wrapper, buffers
        return wrapper

    def plan_replay(self, bs: int, decodes: DecodeBatch) -> Any:
        """Plans by fast_decode_plan: it takes the filled buffers, without plan()'s max() of a tensor, 650 µs at 256."""
        from flashinfer.decode import fast_decode_plan

        wrapper, buffers = self._captured[bs]
        view = decodes.list_pages(self._window_left, buffers.kv_indices)
        lengths = upload(torch.cat((view.indptr_cpu, view.last_page_len_cpu)).numpy(), self._device)
        buffers.kv_indptr[: bs + 1].copy_(lengths[: bs + 1])
        buffers.last_page_len[:bs].copy_(lengths[bs + 1 :])
        with self._space.planning(wrapper):
            fast_decode_plan(
                wrapper,
                view.indptr_cpu,
                view.indices,
                view.last_page_len_cpu,
                *self._sizes,
                global_override_indptr_cpu=view.indptr_cpu,
                **self._options,
            )
        return wrapper

    def _plan(self, wrapper: Any, view: PagedView) -> None:
        with self._space.planning(wrapper):
            wrapper.plan(
                view.indptr_cpu,
                view.indices,
                view.last_page_len_cpu,
                *self._sizes,
                **self._options,
                disable_split_kv=self._never_split and not wrapper.is_cuda_graph_enabled,
            )


def _dummy_pages(bs: int, indices: torch.Tensor) -> PagedView:
    """Plans rows of one token on the dummy page."""
    return PagedView(torch.arange(bs + 1, dtype=torch.int32), indices, torch.ones(bs, dtype=torch.int32))
