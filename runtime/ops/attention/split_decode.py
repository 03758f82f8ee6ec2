"""Decode attention over the paged KV cache: each request's keys are split among blocks, in one kernel, without a plan.

Triton by hand, as `torch.library.triton_op`, so that AOTInductor puts the compiled kernel into a package: it is a piece
of the program (mllm_compile/kernels/decode_attention.py). Only the piece compiler imports this module: a loaded package
needs neither Triton nor this op.

The caller chooses the number of blocks of a request by the number of requests alone; a block without keys ends at once.
The last block of a head to end adds up the others' results, always in the same order. So only the number of other
requests changes a request's numbers. In the deterministic mode that changes nothing: ordered_decode.py.

`benchmarks/kernels/decode_attention_speed.py` compares it with FlashInfer's kernels.

Shape legend: R requests, N blocks that a request's keys are split among, H query heads, Hk kv heads, D head dim,
W pages of the page table, P slots of the KV cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites

MIN_DOT_ROWS = 16  # of tl.dot; query heads of a KV head are padded to as many
_MAX_COMBINED = 16384  # numbers that _combine has in registers, 128 a thread
_STAGES = 3
LOG2_E = math.log2(math.e)


@triton.jit
def slots_of(table_ptr: tl.tensor, offsets: tl.tensor, valid: tl.tensor, PAGE: tl.constexpr) -> tl.tensor:
    """The places in the cache of a request's keys at `offsets`."""
    pages = tl.load(table_ptr + offsets // PAGE, mask=valid, other=0).to(tl.int64)
    return pages * PAGE + offsets % PAGE


@triton.jit
def fetch_row(ptrs: tl.tensor, D: tl.constexpr) -> None:
    """Asks for rows of D numbers into the L2: 128 bytes at a time. A hint: no value is read."""
    LINE: tl.constexpr = 128 // (ptrs.dtype.element_ty.primitive_bitwidth // 8)
    for line in tl.static_range(0, D, LINE):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [(ptrs + line).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def add_keys(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    valid: tl.tensor,
    bias: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One step of the softmax that is computed as keys come: (largest logit, sum, weighted values) with these keys.

    Keys are `valid`, [rows or 1, keys]; a row has seen one before it has none.
    """
    logits = tl.dot(q, tl.trans(k)) * SCALE  # of base 2
    if SOFT_CAP > 0:
        # tanh(x) = 2 / (1 + exp(-2x)) - 1, and exp(-2x) = exp2(-2.885… x). The cap is of base 2 as the logits are.
        logits = SOFT_CAP * (2.0 / (1.0 + tl.exp2(-2.8853900817779268 / SOFT_CAP * logits)) - 1.0)
    if HAS_BIAS:
        logits += bias
    logits = tl.where(valid, logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    weights = tl.exp2(logits - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
    return new_top, total, acc


@triton.jit
def bias_of(table_ptr: tl.tensor, heads: tl.tensor, distances: tl.tensor, num_distances: tl.tensor) -> tl.tensor:
    """The bias of base 2 at distances, by rows of a table [H, 2R + 1]; those beyond its ends are as these."""
    reach = num_distances // 2
    places = heads * num_distances + tl.minimum(tl.maximum(distances, -reach), reach) + reach
    return tl.load(table_ptr + places).to(tl.float32) * 1.4426950408889634


@triton.jit
def sink_weights(sinks_ptr: tl.tensor, members: tl.tensor, top: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    """The weights that the sinks of a kv head's query heads add to each one's sum; `top` is its largest logit."""
    sinks = tl.load(sinks_ptr + members, mask=members < GROUP, other=0.0).to(tl.float32)
    return tl.exp2(sinks * 1.4426950408889634 - top)


@triton.jit
def _combine(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    num_active: tl.tensor,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_REST: tl.constexpr,
) -> None:
    """Adds up what the blocks of one kv head left, past this SM's own cache (.cg): they may be of other SMs."""
    members = tl.arange(0, PADDED_GROUP)
    dims = tl.arange(0, D)
    is_member = members < GROUP
    top = tl.full((PADDED_GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED_GROUP,), tl.float32)
    acc = tl.zeros((PADDED_GROUP, D), tl.float32)
    for first in tl.static_range(0, MAX_SPLITS, SPLITS_AT_ONCE):
        if first < num_active:
            splits = first + tl.arange(0, SPLITS_AT_ONCE)
            parts = splits[:, None] * GROUP + members[None, :]
            is_part = (splits < num_active)[:, None] & is_member[None, :]
            tops = tl.load(tops_ptr + parts, mask=is_part, other=float("-inf"), cache_modifier=".cg")
            totals = tl.load(totals_ptr + parts, mask=is_part, other=0.0, cache_modifier=".cg")
            sums_ptr = partial_ptr + parts[:, :, None] * D + dims[None, None, :]
            sums = tl.load(sums_ptr, mask=is_part[:, :, None], other=0.0, cache_modifier=".cg")
            new_top = tl.where(is_member, tl.maximum(top, tl.max(tops, 0)), 0.0)
            factors = tl.exp2(tops - new_top[None, :])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(factors * totals, 0)
            acc = acc * shrink[:, None] + tl.sum(sums * factors[:, :, None], 0)
            top = new_top
    if HAS_SINKS:
        total += sink_weights(sinks_ptr, members, top, GROUP)
    out = acc / tl.where(is_member, total, 1.0)[:, None]
    places = members[:, None] * D + dims[None, :]
    tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=is_member[:, None])
    if IS_REST:
        tl.store(log_sums_ptr + members, top + tl.log2(total), mask=is_member)


@triton.jit
def _split_decode_kernel(
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
    bias_ptr: tl.tensor,
    first_keys_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    table_stride: tl.tensor,
    num_splits: tl.tensor,
    window_left: tl.tensor,
    num_distances: tl.tensor,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    DOT_ROWS: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_REST: tl.constexpr,
    FETCH_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (kv head, request, split): blocks start in this order, so those without keys come last.

    With FETCH_FIRST the first keys and values are loaded before the previous kernel has ended, except the last token's,
    which it writes. Earlier kernels wrote the page table and keys before the last token.
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    if EARLY and not FETCH_FIRST:
        wait_for_prerequisites()
        start_dependents()
    num_keys = tl.load(seq_lens_ptr + row)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(num_keys - 1 - window_left, 0)
    if CHUNK > 0:
        first = tl.maximum(num_keys - 1, 0) // CHUNK * CHUNK
    if IS_REST:
        first = tl.load(first_keys_ptr)
    share = tl.maximum(tl.cdiv(tl.cdiv(num_keys - first, num_splits), BLOCK), 1) * BLOCK  # a row may have no key
    num_active = tl.cdiv(num_keys - first, share)
    start = first + split * share
    if EARLY and FETCH_FIRST:  # noqa: SIM102 # the one is known when the kernel is compiled
        # In a step without decodes one block has to wait, or the kernel behind would not be behind those ahead.
        if (row == 0) & (start >= num_keys):
            wait_for_prerequisites()
            start_dependents()
    row_table = table_ptr + row.to(tl.int64) * table_stride
    block = tl.arange(0, BLOCK)
    if start < num_keys:
        end = tl.minimum(start + share, num_keys)
        dtype = q_ptr.dtype.element_ty
        dims = tl.arange(0, D)
        group = tl.arange(0, DOT_ROWS)
        sequence = row.to(tl.int64) * HK + head
        heads = row.to(tl.int64) * HK * GROUP + head * GROUP + group
        is_head = (group < GROUP)[:, None]
        slopes = tl.zeros((DOT_ROWS,), tl.float32)
        if HAS_SLOPES:
            slopes = tl.load(slopes_ptr + head * GROUP + group, mask=group < GROUP, other=0.0) * 1.4426950408889634
        own_heads = head * GROUP + tl.minimum(group, GROUP - 1)
        HAS_BIAS: tl.constexpr = HAS_SLOPES or HAS_TABLE
        top = tl.full((DOT_ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((DOT_ROWS,), tl.float32)
        acc = tl.zeros((DOT_ROWS, D), tl.float32)
        if FETCH_FIRST:
            offsets = start + block
            valid = offsets < end
            places = (slots_of(row_table, offsets, valid, PAGE) * HK + head)[:, None] * D + dims[None, :]
            is_old = (offsets < tl.minimum(end, num_keys - 1))[:, None]
            k = tl.load(keys_ptr + places, mask=is_old, other=0.0).to(dtype)
            v = tl.load(values_ptr + places, mask=is_old, other=0.0).to(dtype)
            if EARLY:
                wait_for_prerequisites()
                start_dependents()
            is_last = (offsets == num_keys - 1)[:, None]
            k += tl.load(keys_ptr + places, mask=is_last, other=0.0).to(dtype)
            v += tl.load(values_ptr + places, mask=is_last, other=0.0).to(dtype)
            q = tl.load(q_ptr + heads[:, None] * D + dims[None, :], mask=is_head, other=0.0)
            for offset in range(start, end, BLOCK):
                current_k, current_v = k, v
                offsets = offset + BLOCK + block
                is_next = offsets < end
                places = (slots_of(row_table, offsets, is_next, PAGE) * HK + head)[:, None] * D + dims[None, :]
                k = tl.load(keys_ptr + places, mask=is_next[:, None], other=0.0).to(dtype)
                v = tl.load(values_ptr + places, mask=is_next[:, None], other=0.0).to(dtype)
                is_key = offset + block < end
                distances = (offset + block - (num_keys - 1))[None, :]
                bias = slopes[:, None] * distances.to(tl.float32)
                if HAS_TABLE:
                    bias += bias_of(bias_ptr, own_heads[:, None], distances, num_distances)
                top, total, acc = add_keys(
                    q, current_k, current_v, is_key[None, :], bias, top, total, acc, SCALE, SOFT_CAP, HAS_BIAS
                )
        else:
            q = tl.load(q_ptr + heads[:, None] * D + dims[None, :], mask=is_head, other=0.0)
            for offset in tl.range(start, end, BLOCK, num_stages=STAGES):
                offsets = offset + block
                valid = offsets < end
                places = (slots_of(row_table, offsets, valid, PAGE) * HK + head)[:, None] * D + dims[None, :]
                k = tl.load(keys_ptr + places, mask=valid[:, None], other=0.0).to(dtype)
                v = tl.load(values_ptr + places, mask=valid[:, None], other=0.0).to(dtype)
                distances = (offsets - (num_keys - 1))[None, :]
                bias = slopes[:, None] * distances.to(tl.float32)
                if HAS_TABLE:
                    bias += bias_of(bias_ptr, own_heads[:, None], distances, num_distances)
                top, total, acc = add_keys(q, k, v, valid[None, :], bias, top, total, acc, SCALE, SOFT_CAP, HAS_BIAS)
        if num_active == 1:
            if HAS_SINKS:
                total += sink_weights(sinks_ptr + head * GROUP, group, top, GROUP)
            out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + heads[:, None] * D + dims[None, :], out, mask=is_head)
            if IS_REST:
                tl.store(log_sums_ptr + heads, top + tl.log2(total), mask=group < GROUP)
        else:
            parts = (sequence * num_splits + split) * GROUP + group
            tl.store(partial_ptr + parts[:, None] * D + dims[None, :], acc, mask=is_head)
            tl.store(tops_ptr + parts, top, mask=group < GROUP)
            tl.store(totals_ptr + parts, total, mask=group < GROUP)
            tl.debug_barrier()  # all threads have stored before one says so
            if tl.atomic_add(done_ptr + sequence, 1, sem="acq_rel") == num_active - 1:
                tl.store(done_ptr + sequence, 0)
                first_part = sequence * num_splits
                _combine(
                    out_ptr + (row.to(tl.int64) * HK + head) * GROUP * D,
                    partial_ptr + first_part * GROUP * D,
                    tops_ptr + first_part * GROUP,
                    totals_ptr + first_part * GROUP,
                    sinks_ptr + head * GROUP,
                    log_sums_ptr + (row.to(tl.int64) * HK + head) * GROUP,
                    num_active,
                    GROUP,
                    PADDED_GROUP,
                    D,
                    MAX_SPLITS,
                    SPLITS_AT_ONCE,
                    HAS_SINKS,
                    IS_REST,
                )


def block_of_keys(head_dim: int) -> int:
    """Keys of a product."""
    return 32 if head_dim > 128 else 64


@triton_op("mllm::split_decode", mutates_args={"out", "partial", "tops", "totals", "done"})
def split_decode(
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
    bias: torch.Tensor | None,
    page_size: int,
    max_splits: int,
    sm_scale: float,
    soft_cap: float,
    window_left: int,
    fetch_first: bool,
    chunk: int,
) -> None:
    """Attention of one new token a request over its keys, the token's own included.

    Args:
        q: [R, H, D]; keys, values: [P, Hk, D]; all contiguous and of one dtype, or the cache in float8_e4m3fn.
        page_table: [R, W] int32, the pages of each request, contiguous; seq_lens: [R] int32; with 0
            a row is passed over and its output left as it is. Blocks without keys do not wait, except row 0's.
        out: [R, H, D], contiguous, written.
        partial [R, N, H, D], tops and totals [R, N, H], float32: scratch; N splits.
        done: [R, Hk] int32, zeros, and zeros again in the end.
        sinks: [H], a logit of each query head that takes weight and has no value; contiguous. Or none.
        page_size: tokens of a page.
        max_splits: N at most, a power of two.
        sm_scale: factor of the products; soft_cap: tanh's, 0 for none; window_left: earlier keys seen, -1 for all.
        fetch_first: a token's keys are of earlier steps, except its own. Not so where a step holds several tokens of a
            request.
        slopes: [H] float32: slope · (key's position − query's) is added to a head's logits. Or none.
        bias: [H, 2R + 1], contiguous: added to a head's logits by the same distance, from -R to R; those beyond are as
            its ends. Or none.
        chunk: keys of the token's own chunk of so many positions are seen alone; 0 for no chunks, else without a
            window.
    """
    batch, scratch = (q, keys, values, page_table, seq_lens), (partial, tops, totals, done)
    launch_split_decode(
        batch,
        out,
        scratch,
        page_size,
        max_splits,
        sm_scale,
        sinks=sinks,
        soft_cap=soft_cap,
        window_left=window_left,
        fetch_first=fetch_first,
        slopes=slopes,
        bias=bias,
        chunk=chunk,
    )


def launch_split_decode(
    batch: Sequence[torch.Tensor],
    out: torch.Tensor,
    scratch: Sequence[torch.Tensor],
    page_size: int,
    max_splits: int,
    sm_scale: float,
    *,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
    window_left: int = -1,
    fetch_first: bool = False,
    slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    chunk: int = 0,
    first_keys: torch.Tensor | None = None,
    log_sums: torch.Tensor | None = None,
) -> None:
    """Launches the kernel within an op; arguments as split_decode's, and two more.

    Args:
        batch: q, keys, values, page_table and seq_lens; scratch: partial, tops, totals and done.
        first_keys: [1] int32: keys that every request leaves out, its first ones; with `log_sums`.
        log_sums: [R, H] float32: takes the logarithm to base 2 of a query head's sum of exponentials.
    """
    q, keys, _, page_table, _ = batch
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    num_splits = scratch[0].shape[1]
    group = num_heads // num_kv_heads
    padded_group = triton.next_power_of_2(group)
    wrap_triton(_split_decode_kernel)[(num_kv_heads, num_rows, num_splits)](
        *batch,
        out,
        *scratch,
        q if sinks is None else sinks,  # which is not read without
        q if slopes is None else slopes,
        q if bias is None else bias,
        q if first_keys is None else first_keys,
        q if log_sums is None else log_sums,
        page_table.shape[1],
        num_splits,
        window_left,
        0 if bias is None else bias.shape[1],
        SCALE=sm_scale * LOG2_E,
        SOFT_CAP=soft_cap * LOG2_E,
        GROUP=group,
        PADDED_GROUP=padded_group,
        DOT_ROWS=max(MIN_DOT_ROWS, padded_group),
        HK=num_kv_heads,
        D=head_dim,
        PAGE=page_size,
        BLOCK=block_of_keys(head_dim),
        MAX_SPLITS=max_splits,
        SPLITS_AT_ONCE=min(max_splits, _MAX_COMBINED // (padded_group * head_dim)),
        HAS_WINDOW=window_left >= 0,
        HAS_SINKS=sinks is not None,
        HAS_SLOPES=slopes is not None,
        HAS_TABLE=bias is not None,
        CHUNK=chunk,
        IS_REST=first_keys is not None,
        FETCH_FIRST=fetch_first,
        STAGES=_STAGES,
        EARLY=starts_early(),
        num_warps=4,
        num_stages=1 if fetch_first else _STAGES,
    )
