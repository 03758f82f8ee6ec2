"""Decode attention whose bits go by a row's own length alone: keys in parts, that are added up one after another.

A row of up to MOST_PARTS products has a part for each, a longer one larger parts. A block takes one part or several:
with few rows each has a block of its own, so that all parts are computed beside each other; with many a row has one
block. rows_decode.py has the same parts, and the same order.

Registered and packaged as split_decode.py's. Shape legend: as there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.attention.split.splits import IN_ORDER
from mllm_compile.runtime.ops.attention.split_decode import (
    LOG2_E,
    MIN_DOT_ROWS,
    add_keys,
    block_of_keys,
    fetch_row,
    sink_weights,
    slots_of,
)
from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites

_STAGES = 2  # with 3 registers keep a fourth block with many rows off a multiprocessor
_MOST_IN_REGISTERS = 4  # query heads whose parts one block adds up in registers: with more, likewise
_MOST_SUMS = 8192  # numbers of parts that a block has in registers at once, 64 a thread


@triton.jit
def keys_of_part(num_keys: tl.tensor, BLOCK: tl.constexpr, MOST_PARTS: tl.constexpr) -> tl.tensor:
    """Keys of each part of a row of so many keys: one product's, or as many products' as leave MOST_PARTS parts."""
    return tl.maximum(tl.cdiv(num_keys, BLOCK * MOST_PARTS), 1) * BLOCK


@triton.jit
def add_part(
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    its_top: tl.tensor,
    its_total: tl.tensor,
    its_acc: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(largest logit, sum, weighted values) of parts with those of the next one, which has a key.

    Products and sums are written out as fused or not: a compiler chooses nothing, whatever is around it.
    """
    new_top = tl.maximum(top, its_top)
    shrink = tl.exp2(top - new_top)
    factor = tl.exp2(its_top - new_top)
    total = tl.fma(its_total, factor, total * shrink)
    acc = tl.fma(its_acc, tl.broadcast_to(factor[:, None], its_acc.shape), acc * shrink[:, None])
    return new_top, total, acc


@triton.jit
def _add_parts(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    num_parts: tl.tensor,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    D: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """Adds up the parts of one kv head in order, past this SM's own cache (.cg): they may be of other SMs."""
    members = tl.arange(0, PADDED_GROUP)
    places = members[:, None] * D + tl.arange(0, D)[None, :]
    is_member = members < GROUP
    top = tl.full((PADDED_GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED_GROUP,), tl.float32)
    acc = tl.zeros((PADDED_GROUP, D), tl.float32)
    for first in tl.static_range(0, MOST_PARTS, AT_ONCE):
        if first < num_parts:
            for part in tl.static_range(first, first + AT_ONCE):  # whose loads are under way together
                is_part = part < num_parts
                is_there = is_member & is_part
                heads = part * GROUP + members
                its_top = tl.load(tops_ptr + heads, mask=is_there, other=0.0, cache_modifier=".cg")
                its_total = tl.load(totals_ptr + heads, mask=is_there, other=1.0, cache_modifier=".cg")
                sums_ptr = partial_ptr + part * GROUP * D + places
                its_acc = tl.load(sums_ptr, mask=is_there[:, None], other=0.0, cache_modifier=".cg")
                new_top, new_total, new_acc = add_part(top, total, acc, its_top, its_total, its_acc)
                top, total, acc = (
                    tl.where(is_part, new_top, top),
                    tl.where(is_part, new_total, total),
                    tl.where(is_part, new_acc, acc),
                )
    if HAS_SINKS:
        total += sink_weights(sinks_ptr, members, top, GROUP)
    tl.store(out_ptr + places, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_member[:, None])


@triton.jit
def _store_part(
    partial_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    part: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    GROUP: tl.constexpr,
    DOT_ROWS: tl.constexpr,
    D: tl.constexpr,
) -> None:
    group = tl.arange(0, DOT_ROWS)
    heads = part * GROUP + group
    tl.store(partial_ptr + heads[:, None] * D + tl.arange(0, D)[None, :], acc, mask=(group < GROUP)[:, None])
    tl.store(tops_ptr + heads, top, mask=group < GROUP)
    tl.store(totals_ptr + heads, total, mask=group < GROUP)


@triton.jit
def _ordered_decode_kernel(
    q_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    table_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    done_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    table_stride: tl.tensor,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    DOT_ROWS: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCKS: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (kv head, row, block): blocks start in this order, so those without keys come last.

    A step of R rows writes R keys: a row's keys before its last R are of earlier steps. So with several blocks a row's
    first ones are loaded before the previous kernel has ended. With one block, where registers are short, they are
    asked into the L2, whatever is written: a later write finds them there.
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    place = tl.program_id(2)
    num_keys = tl.load(seq_lens_ptr + row)
    part_keys = keys_of_part(num_keys, BLOCK, MOST_PARTS)
    num_parts = tl.cdiv(num_keys, part_keys)
    share = tl.maximum(tl.cdiv(num_parts, BLOCKS), 1) * part_keys
    start = place * share
    end = tl.minimum(start + share, num_keys)
    row_table = table_ptr + row.to(tl.int64) * table_stride
    dtype = q_ptr.dtype.element_ty
    dims = tl.arange(0, D)
    block = tl.arange(0, BLOCK)
    group = tl.arange(0, DOT_ROWS)
    sequence = row.to(tl.int64) * HK + head
    first_part = sequence * MOST_PARTS
    its_partial, its_tops, its_totals = (
        partial_ptr + first_part * GROUP * D,
        tops_ptr + first_part * GROUP,
        totals_ptr + first_part * GROUP,
    )
    if EARLY:
        start_dependents()
        if (start >= num_keys) & (place == 0):  # of a row without keys: one block has to wait
            wait_for_prerequisites()
    if start < num_keys:
        offsets = start + block
        places = (slots_of(row_table, offsets, offsets < end, PAGE) * HK + head)[:, None] * D + dims[None, :]
        written_before = num_keys - tl.num_programs(1)
        if BLOCKS > 1:
            is_old = (offsets < tl.minimum(end, written_before))[:, None]
            k = tl.load(keys_ptr + places, mask=is_old, other=0.0)
            v = tl.load(values_ptr + places, mask=is_old, other=0.0)
        if EARLY:
            if BLOCKS == 1:
                asked = (slots_of(row_table, offsets, offsets < end, PAGE) * HK + head) * D
                fetch_row(keys_ptr + asked, D)
                fetch_row(values_ptr + asked, D)
            wait_for_prerequisites()
        heads = sequence * GROUP + group
        is_head = (group < GROUP)[:, None]
        q = tl.load(q_ptr + heads[:, None] * D + dims[None, :], mask=is_head, other=0.0)
        slopes = tl.zeros((DOT_ROWS,), tl.float32)
        if HAS_SLOPES:
            slopes = tl.load(slopes_ptr + head * GROUP + group, mask=group < GROUP, other=0.0) * 1.4426950408889634
        top = tl.full((DOT_ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((DOT_ROWS,), tl.float32)
        acc = tl.zeros((DOT_ROWS, D), tl.float32)
        all_top, all_total, all_acc = top, total, acc  # of the parts that are added up in registers
        if BLOCKS > 1:
            # Not under a condition, and into the same registers: else a third block has no room on a multiprocessor.
            is_new = ((offsets >= written_before) & (offsets < end))[:, None]
            k = tl.load(keys_ptr + places, mask=is_new, other=k)
            v = tl.load(values_ptr + places, mask=is_new, other=v)
            bias = slopes[:, None] * (offsets - (num_keys - 1))[None, :].to(tl.float32)
            is_key = offsets < end
            k, v = k.to(dtype), v.to(dtype)
            top, total, acc = add_keys(q, k, v, is_key[None, :], bias, top, total, acc, SCALE, SOFT_CAP, HAS_SLOPES)
            if (part_keys == BLOCK) & (start + BLOCK < end):
                _store_part(its_partial, its_tops, its_totals, start // part_keys, top, total, acc, GROUP, DOT_ROWS, D)
                top = tl.full((DOT_ROWS,), float("-inf"), tl.float32)
                total = tl.zeros((DOT_ROWS,), tl.float32)
                acc = tl.zeros((DOT_ROWS, D), tl.float32)
            start += BLOCK
        for offset in tl.range(start, end, BLOCK, num_stages=STAGES):
            offsets = offset + block
            is_key = offsets < end
            places = (slots_of(row_table, offsets, is_key, PAGE) * HK + head)[:, None] * D + dims[None, :]
            k = tl.load(keys_ptr + places, mask=is_key[:, None], other=0.0).to(dtype)
            v = tl.load(values_ptr + places, mask=is_key[:, None], other=0.0).to(dtype)
            bias = slopes[:, None] * (offsets - (num_keys - 1))[None, :].to(tl.float32)
            top, total, acc = add_keys(q, k, v, is_key[None, :], bias, top, total, acc, SCALE, SOFT_CAP, HAS_SLOPES)
            next_key = offset + BLOCK
            if IN_REGISTERS:
                if (next_key % part_keys == 0) | (next_key >= end):
                    all_top, all_total, all_acc = add_part(all_top, all_total, all_acc, top, total, acc)
                    top = tl.full((DOT_ROWS,), float("-inf"), tl.float32)
                    total = tl.zeros((DOT_ROWS,), tl.float32)
                    acc = tl.zeros((DOT_ROWS, D), tl.float32)
            elif (next_key % part_keys == 0) & (next_key < end):
                _store_part(
                    its_partial, its_tops, its_totals, next_key // part_keys - 1, top, total, acc, GROUP, DOT_ROWS, D
                )
                top = tl.full((DOT_ROWS,), float("-inf"), tl.float32)
                total = tl.zeros((DOT_ROWS,), tl.float32)
                acc = tl.zeros((DOT_ROWS, D), tl.float32)
        if IN_REGISTERS | (num_parts == 1):
            if not IN_REGISTERS:
                all_top, all_total, all_acc = add_part(all_top, all_total, all_acc, top, total, acc)
            if HAS_SINKS:
                all_total += sink_weights(sinks_ptr + head * GROUP, group, all_top, GROUP)
            out = (all_acc / all_total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + heads[:, None] * D + dims[None, :], out, mask=is_head)
        else:
            _store_part(its_partial, its_tops, its_totals, (end - 1) // part_keys, top, total, acc, GROUP, DOT_ROWS, D)
            tl.debug_barrier()  # all threads have stored before one says so, or before others read
            is_last = True
            if BLOCKS > 1:
                is_last = tl.atomic_add(done_ptr + sequence, 1, sem="acq_rel") == tl.cdiv(num_keys, share) - 1
            if is_last:
                if BLOCKS > 1:
                    tl.store(done_ptr + sequence, 0)
                _add_parts(
                    out_ptr + sequence * GROUP * D,
                    its_partial,
                    its_tops,
                    its_totals,
                    sinks_ptr + head * GROUP,
                    num_parts,
                    GROUP,
                    PADDED_GROUP,
                    D,
                    MOST_PARTS,
                    AT_ONCE,
                    HAS_SINKS,
                )


@triton_op("mllm::ordered_decode", mutates_args={"out", "partial", "tops", "totals", "done"})
def ordered_decode(
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
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    page_size: int,
    sm_scale: float,
    soft_cap: float,
    blocks: int,
) -> None:
    """Attention of one new token a row over its request's keys up to its own.

    Args:
        q: [R, H, D]; keys, values: [P, Hk, D]; all contiguous and of one dtype, or the cache in float8_e4m3fn. A
            request's keys but its last R are of earlier steps.
        page_table: [R, W] int32, the pages of each row's request, contiguous; seq_lens: [R] int32; with 0 a row is
            passed over and its output left as it is.
        out: [R, H, D], contiguous, written.
        partial [R, N, H, D], tops and totals [R, N, H], float32: scratch; N is IN_ORDER.most.
        done: [R, Hk] int32, zeros, and zeros again in the end.
        sinks, slopes, page_size, sm_scale, soft_cap: as split_decode's.
        blocks: of a row and KV head, at most IN_ORDER.most. No bit depends on it.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    padded_group = triton.next_power_of_2(group)
    wrap_triton(_ordered_decode_kernel)[(num_kv_heads, num_rows, blocks)](
        q,
        keys,
        values,
        page_table,
        seq_lens,
        out,
        partial,
        tops,
        totals,
        done,
        q if sinks is None else sinks,  # which is not read without
        q if slopes is None else slopes,
        page_table.shape[1],
        SCALE=sm_scale * LOG2_E,
        SOFT_CAP=soft_cap * LOG2_E,
        GROUP=group,
        PADDED_GROUP=padded_group,
        DOT_ROWS=max(MIN_DOT_ROWS, padded_group),
        HK=num_kv_heads,
        D=head_dim,
        PAGE=page_size,
        BLOCK=block_of_keys(head_dim),
        MOST_PARTS=IN_ORDER.most,
        AT_ONCE=min(IN_ORDER.most, _MOST_SUMS // (padded_group * head_dim)),
        BLOCKS=blocks,
        IN_REGISTERS=blocks == 1 and group <= _MOST_IN_REGISTERS,
        HAS_SINKS=sinks is not None,
        HAS_SLOPES=slopes is not None,
        STAGES=_STAGES,
        EARLY=starts_early(),
        num_warps=4,
        num_stages=_STAGES,
    )
