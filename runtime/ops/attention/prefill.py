"""Attention of prompts over the paged KV cache with what FlashInfer's kernels lack: biases by distance, and chunks.

Triton by hand, as ops/attention/split_decode.py, which says why. A block takes some of a request's new tokens for one
query head, and reads the keys that any of them sees.

Shape legend: T tokens, R requests, N tiles, H query heads, Hk kv heads, D head dim, W pages of the page table, P slots
of the KV cache.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.attention.split.prefill_tiles import TILE_TOKENS
from mllm_compile.runtime.ops.attention.split_decode import bias_of
from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites

_LOG2_E = math.log2(math.e)


@triton.jit
def _paged_prefill_kernel(
    q_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    table_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    out_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    table_stride: tl.tensor,
    num_distances: tl.tensor,
    SCALE: tl.constexpr,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (query head, tile): heads that read the same keys are next to each other."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    head = tl.program_id(0)
    tile_ptr = tiles_ptr + tl.program_id(1) * 4
    row = tl.load(tile_ptr)
    first_token = tl.load(tile_ptr + 1)
    num_tokens = tl.load(tile_ptr + 2)
    first = tl.load(tile_ptr + 3)
    num_keys = tl.load(seq_lens_ptr + row)
    members = first + tl.arange(0, ROWS)
    is_token = members < num_tokens
    positions = num_keys - num_tokens + members
    start = 0
    first_visible = positions * 0
    if CHUNK > 0:
        start = (num_keys - num_tokens + first) // CHUNK * CHUNK
        first_visible = positions // CHUNK * CHUNK
    end = tl.minimum(num_keys - num_tokens + first + ROWS, num_keys)
    dims = tl.arange(0, D)
    block = tl.arange(0, KEYS)
    places = ((first_token + members).to(tl.int64) * H + head)[:, None] * D + dims[None, :]
    q = tl.load(q_ptr + places, mask=is_token[:, None], other=0.0)
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(slopes_ptr + head) * 1.4426950408889634
    row_table = table_ptr + row.to(tl.int64) * table_stride
    kv_head = head // (H // HK)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    for offset in tl.range(start, end, KEYS, num_stages=STAGES):
        offsets = offset + block
        valid = offsets < end
        pages = tl.load(row_table + offsets // PAGE, mask=valid, other=0).to(tl.int64)
        slots = ((pages * PAGE + offsets % PAGE) * HK + kv_head)[:, None] * D + dims[None, :]
        k = tl.load(keys_ptr + slots, mask=valid[:, None], other=0.0)
        v = tl.load(values_ptr + slots, mask=valid[:, None], other=0.0)
        logits = tl.dot(q, tl.trans(k)) * SCALE  # of base 2
        if HAS_SLOPES:
            logits += slope * (offsets[None, :] - positions[:, None]).to(tl.float32)
        if HAS_TABLE:
            logits += bias_of(bias_ptr, head, offsets[None, :] - positions[:, None], num_distances)
        visible = offsets[None, :] <= positions[:, None]
        if CHUNK > 0:
            visible = visible & (offsets[None, :] >= first_visible[:, None])
        logits = tl.where(visible, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        # Of a later chunk than the tile's first token no key may have come yet.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        top = new_top
    out = acc / tl.where(is_token, total, 1.0)[:, None]
    tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=is_token[:, None])


@triton_op("mllm::paged_prefill", mutates_args={"out"})
def paged_prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    slopes: torch.Tensor | None,
    bias: torch.Tensor | None,
    page_size: int,
    sm_scale: float,
    chunk: int,
) -> None:
    """Causal attention of several new tokens a request over its keys, these tokens' included.

    Args:
        q: [T, H, D]; keys, values: [P, Hk, D]; all contiguous and of one dtype; D a power of two.
        page_table: [R, W] int32, the pages of each request, contiguous; seq_lens: [R] int32, new tokens included.
        tiles: [N, 4] int32: for each block its request, the request's first token in q, its number of new tokens, and
            the first of the block's TILE_TOKENS of these.
        out: [T, H, D], contiguous, written where tiles are.
        slopes: [H] float32: slope · (key's position − query's) is added to a head's logits; or none.
        bias: [H, 2R + 1], as split_decode's; or none.
        page_size: tokens of a page.
        sm_scale: factor of the products.
        chunk: tokens see keys of their own chunk of so many positions alone; 0 for no chunks.
    """
    _, num_heads, head_dim = q.shape
    is_wide = head_dim > 128
    wrap_triton(_paged_prefill_kernel)[(num_heads, tiles.shape[0])](
        q,
        keys,
        values,
        page_table,
        seq_lens,
        tiles,
        out,
        q if slopes is None else slopes,  # which is not read without
        q if bias is None else bias,
        page_table.shape[1],
        0 if bias is None else bias.shape[1],
        SCALE=sm_scale * _LOG2_E,
        H=num_heads,
        HK=keys.shape[1],
        D=head_dim,
        PAGE=page_size,
        CHUNK=chunk,
        HAS_SLOPES=slopes is not None,
        HAS_TABLE=bias is not None,
        ROWS=TILE_TOKENS,
        KEYS=32 if is_wide else 64,
        STAGES=2,
        EARLY=starts_early(),
        num_warps=8,
        num_stages=2,
    )
