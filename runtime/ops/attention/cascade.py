"""Decode attention of requests that begin with the same pages (a cascade), without a plan: so it can be captured.

Three kernels. One has queries of all requests over the shared keys, which are split among blocks. One has each request
over its own keys (ops/attention/split_decode.py), and also gives a sum of exponentials. One adds both up. How many keys
are shared is read on the device.

Shape legend: R requests, N blocks that a request's own keys are split among, M blocks for the shared ones, H query
heads, Hk kv heads, D head dim, W pages of the page table, P slots of the KV cache.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.attention.split_decode import launch_split_decode
from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites

_LOG2_E = math.log2(math.e)
_ROWS = 64  # query heads of a block, of several requests


@triton.jit
def _part(num_keys: tl.tensor, num_parts: tl.tensor, KEYS: tl.constexpr) -> tl.tensor:
    """Keys of each block: whole steps of the loop."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, num_parts), KEYS), 1) * KEYS


@triton.jit
def _shared_kernel(
    q_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    table_ptr: tl.tensor,
    shared_len_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_parts: tl.tensor,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (kv head, tile of query heads of all requests, part of the shared keys)."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    head = tl.program_id(0)
    part = tl.program_id(2)
    num_keys = tl.load(shared_len_ptr)
    share = _part(num_keys, num_parts, KEYS)
    start = part * share
    if start < num_keys:
        end = tl.minimum(start + share, num_keys)
        members = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        is_member = members < num_rows * GROUP
        heads = (members // GROUP) * (HK * GROUP) + head * GROUP + members % GROUP
        dims = tl.arange(0, D)
        block = tl.arange(0, KEYS)
        q = tl.load(q_ptr + heads[:, None] * D + dims[None, :], mask=is_member[:, None], other=0.0)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, D), tl.float32)
        for offset in tl.range(start, end, KEYS, num_stages=STAGES):
            offsets = offset + block
            valid = offsets < end
            pages = tl.load(table_ptr + offsets // PAGE, mask=valid, other=0).to(tl.int64)
            places = ((pages * PAGE + offsets % PAGE) * HK + head)[:, None] * D + dims[None, :]
            k = tl.load(keys_ptr + places, mask=valid[:, None], other=0.0)
            v = tl.load(values_ptr + places, mask=valid[:, None], other=0.0)
            logits = tl.where(valid[None, :], tl.dot(q, tl.trans(k)) * SCALE, float("-inf"))  # of base 2
            new_top = tl.maximum(top, tl.max(logits, 1))
            weights = tl.exp2(logits - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
            top = new_top
        parts = part.to(tl.int64) * (num_rows * HK * GROUP) + heads
        tl.store(partial_ptr + parts[:, None] * D + dims[None, :], acc, mask=is_member[:, None])
        tl.store(tops_ptr + parts, top, mask=is_member)
        tl.store(totals_ptr + parts, total, mask=is_member)


@triton.jit
def _merge_kernel(
    out_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    shared_len_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_parts: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (request, some query heads): adds what was found over the shared keys to the request's own output."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    row = tl.program_id(0)
    num_keys = tl.load(shared_len_ptr)
    if (num_keys > 0) & (tl.load(seq_lens_ptr + row) > 0):
        members = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        is_head = members < H
        dims = tl.arange(0, D)
        heads = row.to(tl.int64) * H + members
        places = heads[:, None] * D + dims[None, :]
        top = tl.load(log_sums_ptr + heads, mask=is_head, other=0.0)
        total = tl.full((HEADS,), 1.0, tl.float32)
        acc = tl.load(out_ptr + places, mask=is_head[:, None], other=0.0).to(tl.float32)
        num_active = tl.cdiv(num_keys, _part(num_keys, num_parts, KEYS))
        for part in range(num_active):
            parts = part * (num_rows * H) + heads
            its_top = tl.load(tops_ptr + parts, mask=is_head, other=0.0)
            its_total = tl.load(totals_ptr + parts, mask=is_head, other=0.0)
            sums = tl.load(partial_ptr + parts[:, None] * D + dims[None, :], mask=is_head[:, None], other=0.0)
            new_top = tl.maximum(top, its_top)
            shrink = tl.exp2(top - new_top)
            factor = tl.exp2(its_top - new_top)
            total = total * shrink + its_total * factor
            acc = acc * shrink[:, None] + sums * factor[:, None]
            top = new_top
        tl.store(out_ptr + places, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_head[:, None])


@triton_op(
    "mllm::cascade_decode",
    mutates_args={
        *("out", "partial", "tops", "totals", "done"),
        *("shared_partial", "shared_tops", "shared_totals", "log_sums"),
    },
)
def cascade_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    partial: torch.Tensor,
    tops: torch.Tensor,
    totals: torch.Tensor,
    done: torch.Tensor,
    shared_len: torch.Tensor,
    shared_partial: torch.Tensor,
    shared_tops: torch.Tensor,
    shared_totals: torch.Tensor,
    log_sums: torch.Tensor,
    page_size: int,
    max_splits: int,
    sm_scale: float,
) -> None:
    """Attention of one new token a request over its keys; the first `shared_len` keys are the same pages for all.

    Args:
        q to done, page_size to sm_scale: as split_decode has them; no window, soft cap or sinks.
        shared_len: [1] int32: fewer than any request's keys, the pages of the first row; 0: nothing is shared.
        shared_partial [M, R, H, D], shared_tops and shared_totals [M, R, H], log_sums [R, H]: float32 scratch.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, num_parts = keys.shape[1], shared_tops.shape[0]
    group = num_heads // num_kv_heads
    keys_at_once = 32 if head_dim > 128 else 64
    wrap_triton(_shared_kernel)[(num_kv_heads, triton.cdiv(num_rows * group, _ROWS), num_parts)](
        q,
        keys,
        values,
        page_table,
        shared_len,
        shared_partial,
        shared_tops,
        shared_totals,
        num_rows,
        num_parts,
        SCALE=sm_scale * _LOG2_E,
        GROUP=group,
        HK=num_kv_heads,
        D=head_dim,
        PAGE=page_size,
        ROWS=_ROWS,
        KEYS=keys_at_once,
        STAGES=3,
        EARLY=starts_early(),
        num_warps=4,
        num_stages=3,
    )
    launch_split_decode(
        (q, keys, values, page_table, seq_lens),
        out,
        (partial, tops, totals, done),
        page_size,
        max_splits,
        sm_scale,
        first_keys=shared_len,
        log_sums=log_sums,
    )
    heads_at_once = min(triton.next_power_of_2(num_heads), 8)
    wrap_triton(_merge_kernel)[(num_rows, triton.cdiv(num_heads, heads_at_once))](
        out,
        log_sums,
        shared_partial,
        shared_tops,
        shared_totals,
        shared_len,
        seq_lens,
        num_rows,
        num_parts,
        H=num_heads,
        D=head_dim,
        HEADS=heads_at_once,
        KEYS=keys_at_once,
        EARLY=starts_early(),
        num_warps=4,
    )
