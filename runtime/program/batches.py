"""Batches by hand, as docs/low-level.md has them and an engine's steps make them.

Shape legend: T tokens, R requests.
"""

from __future__ import annotations

import numpy as np
import torch

from mllm_compile.runtime.attention.base import AttentionBackend
from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode
from mllm_compile.runtime.memory_pool import KVPool, ReqToTokenPool


class RunnerBatches:
    """The batches of a ModelRunner."""

    device: torch.device
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: KVPool
    attn_backend: AttentionBackend

    def prepare_forward_batch_decode(
        self,
        input_ids: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        out_cache_loc: torch.Tensor,
        return_logprob: bool = False,
        top_logprobs_nums: list[int] | None = None,
        mrope_position_deltas: torch.Tensor | None = None,
        *,
        seq_lens_cpu: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> ForwardBatch:
        """Prepare a batch of one new token a request.

        Args:
            input_ids: [R] int64; req_pool_indices: [R] int64; out_cache_loc: [R] int64; seq_lens: [R] int32, with the
                new token. On the device.
            mrope_position_deltas: [R] int64 that are added to seq_lens - 1 (positions_of in media/positions.py).
            seq_lens_cpu: seq_lens on the host; without it this waits for the device.
            positions: [R] int64; made from the lengths otherwise.
        """
        seq_lens_cpu = seq_lens.cpu() if seq_lens_cpu is None else seq_lens_cpu
        if positions is None:
            positions = seq_lens.long() - 1
            positions = positions if mrope_position_deltas is None else positions + mrope_position_deltas
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE if len(seq_lens_cpu) else ForwardMode.IDLE,
            batch_size=len(seq_lens_cpu),
            input_ids=input_ids,
            req_pool_indices=req_pool_indices,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens_cpu,
            out_cache_loc=out_cache_loc,
            positions=positions,
            mrope_position_deltas=mrope_position_deltas,
            return_logprob=return_logprob,
            top_logprobs_nums=top_logprobs_nums,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool=self.token_to_kv_pool,
            attn_backend=self.attn_backend,
        )

    def prepare_forward_batch_extend(
        self,
        input_ids: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        out_cache_loc: torch.Tensor,
        return_logprob: bool = False,
        top_logprobs_nums: list[int] | None = None,
        *,
        num_decodes: int = 0,
        is_target_verify: bool = False,
        extend_seq_lens_cpu: torch.Tensor | None = None,
        extend_prefix_lens_cpu: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> ForwardBatch:
        """Prepare a batch of prompt tokens, after `num_decodes` decodes (MIXED) or alone (EXTEND), or of decodes of
        several tokens each (TARGET_VERIFY).

        Args:
            input_ids: [T] int64, request after request; out_cache_loc: [T] int64; req_pool_indices: [R] int64;
                seq_lens, extend_seq_lens, extend_prefix_lens: [R] int32: prefix + new, new, prefix. On the device.
            extend_seq_lens_cpu, extend_prefix_lens_cpu: the same on the host; without them this waits for the device.
            positions: [T] int64; made from the lengths otherwise.
        """
        mode = ForwardMode.MIXED if num_decodes else ForwardMode.EXTEND
        if is_target_verify:
            mode = ForwardMode.TARGET_VERIFY
        new = extend_seq_lens.cpu() if extend_seq_lens_cpu is None else extend_seq_lens_cpu
        prefix = extend_prefix_lens.cpu() if extend_prefix_lens_cpu is None else extend_prefix_lens_cpu
        lengths = new.numpy()  # numpy takes a third of torch's time for as few numbers, and the GPU waits
        seq_lens_np = prefix.numpy() + lengths
        if positions is None:
            offsets = np.repeat(seq_lens_np - np.cumsum(lengths), lengths)
            positions = torch.from_numpy(offsets + np.arange(offsets.size)).to(self.device)
        return ForwardBatch(
            forward_mode=mode,
            batch_size=lengths.size,
            input_ids=input_ids,
            req_pool_indices=req_pool_indices,
            seq_lens=seq_lens,
            seq_lens_cpu=torch.from_numpy(seq_lens_np),
            out_cache_loc=out_cache_loc,
            positions=positions,
            extend_seq_lens=extend_seq_lens,
            extend_prefix_lens=extend_prefix_lens,
            extend_seq_lens_cpu=new,
            extend_prefix_lens_cpu=prefix,
            return_logprob=return_logprob,
            top_logprobs_nums=top_logprobs_nums,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool=self.token_to_kv_pool,
            attn_backend=self.attn_backend,
        )
