"""Decodes whose neighbours may be of one request: rows of a prompt in the deterministic mode, a token each.

A program takes as many neighbouring rows as a product has room for beside each other. Rows of one request whose parts
are of as many keys are attended together: their keys are read once. A row's bits are as by ordered_decode. Keys are in
the same order, and a key that a row does not see adds zeros.

Registered and packaged as split_decode.py's. Shape legend: as there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.attention.split.splits import IN_ORDER
from mllm_compile.runtime.ops.attention.ordered_decode import add_part, keys_of_part
from mllm_compile.runtime.ops.attention.split_decode import LOG2_E, add_keys, block_of_keys, sink_weights, slots_of
from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites

# Of a product: twice split_decode's, by the same instruction. Those of 64 rows have another, and other bits.
_DOT_ROWS = 32


@triton.jit
def _rows_decode_kernel(
    q_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    table_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    table_stride: tl.tensor,
    num_rows: tl.tensor,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    DOT_ROWS: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (kv head, tile of rows): a turn for each stretch of rows of one request."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    head = tl.program_id(0)
    first_row = tl.program_id(1) * (DOT_ROWS // PADDED_GROUP)
    dtype = q_ptr.dtype.element_ty
    dims = tl.arange(0, D)
    block = tl.arange(0, BLOCK)
    place = tl.arange(0, DOT_ROWS)
    group, rows = place % PADDED_GROUP, first_row + place // PADDED_GROUP
    is_row = (group < GROUP) & (rows < num_rows)
    lengths = tl.load(seq_lens_ptr + rows, mask=rows < num_rows, other=0)
    heads = (rows.to(tl.int64) * HK + head) * GROUP + group
    q = tl.load(q_ptr + heads[:, None] * D + dims[None, :], mask=is_row[:, None], other=0.0)
    slopes = tl.zeros((DOT_ROWS,), tl.float32)
    if HAS_SLOPES:
        slopes = tl.load(slopes_ptr + head * GROUP + group, mask=group < GROUP, other=0.0) * 1.4426950408889634
    end_row = tl.minimum(first_row + DOT_ROWS // PADDED_GROUP, num_rows)
    start = first_row
    while start < end_row:
        row_table = table_ptr + start.to(tl.int64) * table_stride
        num_keys = tl.load(seq_lens_ptr + start)
        part_keys = keys_of_part(num_keys, BLOCK, MOST_PARTS)
        # A token's page is its request's alone. So the next row is of the same request if it has that page there.
        stop = start + 1
        goes_on = stop < end_row
        while goes_on:
            page = tl.maximum(num_keys - 1, 0) // PAGE
            next_keys = tl.load(seq_lens_ptr + stop)
            same = tl.load(row_table + page) == tl.load(table_ptr + stop.to(tl.int64) * table_stride + page)
            alike = part_keys == keys_of_part(next_keys, BLOCK, MOST_PARTS)
            goes_on = same & alike & (next_keys == num_keys + 1) & (num_keys > 0)
            if goes_on:
                num_keys = next_keys
                row_table = table_ptr + stop.to(tl.int64) * table_stride
                stop += 1
                goes_on = stop < end_row
        is_mine = (rows >= start) & (rows < stop)
        my_keys = tl.where(is_mine, lengths, num_keys)
        top = tl.full((DOT_ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((DOT_ROWS,), tl.float32)
        acc = tl.zeros((DOT_ROWS, D), tl.float32)
        all_top, all_total, all_acc = top, total, acc
        for offset in tl.range(0, num_keys, BLOCK, num_stages=STAGES):
            offsets = offset + block
            valid = offsets < num_keys
            places = (slots_of(row_table, offsets, valid, PAGE) * HK + head)[:, None] * D + dims[None, :]
            k = tl.load(keys_ptr + places, mask=valid[:, None], other=0.0).to(dtype)
            v = tl.load(values_ptr + places, mask=valid[:, None], other=0.0).to(dtype)
            is_seen = offsets[None, :] < my_keys[:, None]
            bias = slopes[:, None] * (offsets[None, :] - (my_keys[:, None] - 1)).to(tl.float32)
            top, total, acc = add_keys(q, k, v, is_seen, bias, top, total, acc, SCALE, SOFT_CAP, HAS_SLOPES)
            ends = ((offset + BLOCK) % part_keys == 0) | (offset + BLOCK >= num_keys)
            if ends:
                takes = offset // part_keys * part_keys < my_keys  # others see no key of the part
                new_top, new_total, new_acc = add_part(all_top, all_total, all_acc, top, total, acc)
                all_top = tl.where(takes, new_top, all_top)
                all_total = tl.where(takes, new_total, all_total)
                all_acc = tl.where(takes[:, None], new_acc, all_acc)
                top = tl.full((DOT_ROWS,), float("-inf"), tl.float32)
                total = tl.zeros((DOT_ROWS,), tl.float32)
                acc = tl.zeros((DOT_ROWS, D), tl.float32)
        top, total, acc = all_top, all_total, all_acc
        if HAS_SINKS:
            total += sink_weights(sinks_ptr + head * GROUP, group, top, GROUP)
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        is_stored = (is_mine & is_row & (lengths > 0))[:, None]
        tl.store(out_ptr + heads[:, None] * D + dims[None, :], out, mask=is_stored)
        start = stop


@triton_op("mllm::rows_decode", mutates_args={"out"})
def rows_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    page_size: int,
    sm_scale: float,
    soft_cap: float,
) -> None:
    """Attention of one new token a row over its request's keys up to its own.

    A row's page in which its own key is belongs to its request alone.

    Args:
        q: [R, H, D]; keys, values: [P, Hk, D]; all contiguous and of one dtype, or the cache in float8_e4m3fn.
        page_table: [R, W] int32, the pages of each row's request, contiguous; seq_lens: [R] int32; with 0 a row is
            passed over and its output left as it is.
        out: [R, H, D], contiguous, written.
        sinks, slopes, page_size, sm_scale, soft_cap: as split_decode's.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    padded_group = triton.next_power_of_2(group)
    dot_rows = max(_DOT_ROWS, padded_group)
    rows_of_tile = dot_rows // padded_group
    wrap_triton(_rows_decode_kernel)[(num_kv_heads, (num_rows + rows_of_tile - 1) // rows_of_tile)](
        q,
        keys,
        values,
        page_table,
        seq_lens,
        out,
        q if sinks is None else sinks,  # which is not read without
        q if slopes is None else slopes,
        page_table.shape[1],
        num_rows,
        SCALE=sm_scale * LOG2_E,
        SOFT_CAP=soft_cap * LOG2_E,
        GROUP=group,
        PADDED_GROUP=padded_group,
        DOT_ROWS=dot_rows,
        HK=num_kv_heads,
        D=head_dim,
        PAGE=page_size,
        BLOCK=block_of_keys(head_dim),
        HAS_SINKS=sinks is not None,
        HAS_SLOPES=slopes is not None,
        MOST_PARTS=IN_ORDER.most,
        STAGES=3,
        EARLY=starts_early(),
        num_warps=4,
        num_stages=3,
    )
