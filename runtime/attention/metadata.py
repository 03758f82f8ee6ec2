"""Turns a ForwardBatch into attention's input: one builder makes `attn_metadata[layer]`, shared by all layers.

CommonAttentionMetadata is the part of a batch that all backends need, on the host wherever planning is done there.
Plans of a particular kernel library stay in its backend.

Shape legend: T tokens, R requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from mllm_compile.runtime.attention.layer import AttentionLayer

if TYPE_CHECKING:
    from mllm_compile.runtime.forward_batch import ForwardBatch


@dataclass(frozen=True, kw_only=True)
class CommonAttentionMetadata:
    """One batch, shared by its layers. Names ending in _cpu are on the host and never cost a wait for the device."""

    batch: ForwardBatch
    query_start_loc_cpu: torch.Tensor  # [R + 1] int32: rows of request i are [i] … [i + 1] in [T]
    seq_lens: torch.Tensor  # [R] int32
    seq_lens_cpu: torch.Tensor  # [R] int32
    num_computed_tokens_cpu: torch.Tensor  # [R] int32: what was in the cache before this step
    num_reqs: int
    num_actual_tokens: int  # without padding
    max_query_len: int
    block_table: torch.Tensor  # [rows, max_context_len] int32: slot of each position; row i is req_pool_indices[i]

    @cached_property
    def num_decodes(self) -> int:
        """The first requests that bring one new token each."""
        if self.max_query_len <= 1:
            return self.num_reqs
        starts = self.query_start_loc_cpu.numpy()
        # Of prompts alone, whose launch waits for this, the first is one.
        return int((starts[1:] - starts[:-1] > 1).argmax()) if starts[1] <= 1 else 0

    @cached_property
    def is_fresh(self) -> bool:
        """True of prompts alone, each from its first token on: nothing of them is in the cache yet."""
        return self.num_decodes == 0 < self.num_reqs and not self.num_computed_tokens_cpu.numpy().any()

    @classmethod
    def of(cls, batch: ForwardBatch) -> CommonAttentionMetadata:
        """The batch's metadata, derived from its host copies when it is first asked for.

        Raises:
            RuntimeError: an EXTEND or MIXED batch lacks the host copy of its lengths.
        """
        if batch.common_attn_metadata is None:
            batch.common_attn_metadata = cls._derive(batch)
        metadata: CommonAttentionMetadata = batch.common_attn_metadata
        return metadata

    @classmethod
    def _derive(cls, batch: ForwardBatch) -> CommonAttentionMetadata:
        seq_lens = batch.seq_lens_cpu.numpy()
        if batch.forward_mode.is_decode_or_idle():
            query_lens = np.ones_like(seq_lens)
        elif batch.extend_seq_lens_cpu is None:
            raise RuntimeError("EXTEND and MIXED need extend_seq_lens_cpu: use prepare_forward_batch_extend")
        else:
            query_lens = batch.extend_seq_lens_cpu.numpy()
        starts = np.zeros(batch.batch_size + 1, dtype=np.int32)
        np.add.accumulate(query_lens, out=starts[1:])
        return cls(
            batch=batch,
            query_start_loc_cpu=torch.from_numpy(starts),
            seq_lens=batch.seq_lens,
            seq_lens_cpu=batch.seq_lens_cpu,
            num_computed_tokens_cpu=torch.from_numpy(seq_lens - query_lens),
            num_reqs=batch.batch_size,
            num_actual_tokens=int(starts[-1]),
            max_query_len=max(query_lens.tolist(), default=0),
            block_table=batch.req_to_token_pool.req_to_token,
        )


@dataclass(frozen=True)
class StepPrompts:
    """A step of prompts alone, on the host.

    Attributes:
        starts: [R + 1] int32: the first token of each, and the end of the last one.
        prefix_lens: [R] int32: what of each is in the cache.
        rows: [R] int: their rows of the table of slots, where their states are left too.
        state_rows: [R] int: where their states are read, of those that have some: a cached prefix's rows, or their own.
        list_pages: gives the ids of their pages, new tokens' too, one prompt's behind another's: [P] int32.
    """

    starts: np.ndarray
    prefix_lens: np.ndarray
    rows: np.ndarray
    state_rows: np.ndarray
    list_pages: Callable[[], np.ndarray]

    @cached_property
    def has_prefix(self) -> bool:
        """True if some go on from what is in the cache."""
        return bool(self.prefix_lens.any())

    @cached_property
    def query_lens(self) -> np.ndarray:
        """[R] int32: new tokens of each."""
        lens: np.ndarray = self.starts[1:] - self.starts[:-1]
        return lens

    @cached_property
    def num_keys(self) -> np.ndarray:
        """[R] int32: tokens that each has with them."""
        lens: np.ndarray = self.prefix_lens + self.query_lens
        return lens


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """`attn_metadata[layer]`: what the attention op reads."""

    batch: ForwardBatch
    num_actual_tokens: int  # without padding


@dataclass(frozen=True)
class KVCacheSpec:
    """The layers that share one page table."""

    layers: tuple[AttentionLayer, ...]
    page_size: int


class AttentionMetadataBuilder:
    """Makes the metadata of a batch for the layers of one KVCacheSpec."""

    def __init__(self, kv_cache_spec: KVCacheSpec) -> None:
        self.kv_cache_spec = kv_cache_spec
        self._names = [layer.name for layer in kv_cache_spec.layers]

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata
    ) -> dict[str, AttentionMetadata]:
        """Layer name → metadata, the same object for every layer.

        Args:
            common_prefix_len: the batch's, which is checked: first tokens that all decodes have in the same pages, and
                that are read once for them all; 0: for each of them.

        Raises:
            ValueError: a decode has no further token, its new one, or the prefix is no whole pages.
        """
        common = common_attn_metadata
        if common_prefix_len:
            self._check_prefix(common_prefix_len, common.seq_lens_cpu[: common.num_decodes])
        metadata = AttentionMetadata(batch=common.batch, num_actual_tokens=common.num_actual_tokens)
        return dict.fromkeys(self._names, metadata)

    def _check_prefix(self, common_prefix_len: int, decode_lens: torch.Tensor) -> None:
        shortest = int(decode_lens.min()) if len(decode_lens) else 0
        if not 0 < common_prefix_len < shortest or common_prefix_len % self.kv_cache_spec.page_size:
            raise ValueError(
                f"common_prefix_len must be whole pages of {self.kv_cache_spec.page_size} tokens, fewer than the "
                f"{shortest} of the shortest decode, got {common_prefix_len}"
            )


def split_decodes_and_prefills(common: CommonAttentionMetadata, decode_threshold: int = 1) -> tuple[int, int, int, int]:
    """(num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens) of a batch with its decodes first.

    The leading requests of at most `decode_threshold` new tokens are decodes. A short one behind a longer one (the end
    of a prompt, say) counts as a prefill, which computes the same.
    """
    if common.max_query_len <= decode_threshold:
        return common.num_reqs, 0, common.num_actual_tokens, 0
    starts = common.query_start_loc_cpu.numpy()
    num_decodes = common.num_decodes
    if decode_threshold > 1:
        num_decodes = int((starts[1:] - starts[:-1] > decode_threshold).argmax())
    num_decode_tokens = int(starts[num_decodes])
    return (
        num_decodes,
        common.num_reqs - num_decodes,
        num_decode_tokens,
        common.num_actual_tokens - num_decode_tokens,
    )


def get_kv_cache_layout() -> str:
    """NHD: a page is [page_size, heads, head_dim], as KVPool allocates it."""
    return "NHD"
