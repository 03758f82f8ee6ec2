"""Attention over the latents of a paged KV cache: of decodes, whose keys are split among blocks, and of prompts.

The cache holds of each token c [C] (values, and the first columns of keys) and the rest of its key [D - C]. A block
reads them once for a tile of query heads; many blocks of one request find them in the GPU's L2 cache.

Triton by hand, as ops/attention/split_decode.py, which says why. A block of a decode whose keys are not split writes
its output; else a second kernel adds up what the blocks left, always in the same order.

Shape legend: T tokens, R requests, N blocks that a request's keys are split among, H query heads, D width of keys, C
width of values, W pages of the page table, P slots of the KV cache, X numbers of scratch.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.attention.latent.tiles import PREFILL_TILE, decode_tile, num_decode_tiles
from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites

_MIN_DOT_WIDTH = 16  # of tl.dot
_SUMMED_NUMBERS = 512  # of one split, that a block adds up to others
_SUMMED_AT_ONCE = 8  # splits
_LOG2_E = math.log2(math.e)


@triton.jit
def _attend(
    q_ptr: tl.tensor,
    latents_ptr: tl.tensor,
    table_ptr: tl.tensor,
    heads: tl.tensor,
    is_head: tl.tensor,
    limits: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    SCALE: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    PADDED_C: tl.constexpr,
    PADDED_REST: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(largest logit, sum, weighted values [C, ROWS]) of the query heads at rows `heads` of q over the keys start … end
    of one request, `start` a multiple of KEYS; each sees the keys before its limit, at least one of them.

    Keys are the rows of the products and query heads their columns: tensor cores take as few as 16 columns, but 64
    rows.
    """
    columns = tl.arange(0, PADDED_C)
    rest = tl.arange(0, PADDED_REST)
    is_column = columns < C
    is_rest = rest < D - C
    q_ptrs = q_ptr + heads[:, None] * D
    q = tl.trans(tl.load(q_ptrs + columns[None, :], mask=is_head[:, None] & is_column[None, :], other=0.0))
    q_rest = tl.trans(tl.load(q_ptrs + C + rest[None, :], mask=is_head[:, None] & is_rest[None, :], other=0.0))
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((PADDED_C, ROWS), tl.float32)
    block = tl.arange(0, KEYS)
    page = tl.load(table_ptr + start // PAGE)
    for offset in tl.range(start, end, KEYS, num_stages=STAGES):
        offsets = offset + block
        valid = offsets < end
        if PAGE % KEYS == 0:  # a step's keys are in one page: its number is read a step ahead, as latents wait for it
            places = (page.to(tl.int64) * PAGE + offset % PAGE + block)[:, None] * D
            page = tl.load(table_ptr + (offset + KEYS) // PAGE, mask=offset + KEYS < end, other=0)
        else:
            pages = tl.load(table_ptr + offsets // PAGE, mask=valid, other=0).to(tl.int64)
            places = (pages * PAGE + offsets % PAGE)[:, None] * D
        latent = tl.load(latents_ptr + places + columns[None, :], mask=valid[:, None] & is_column[None, :], other=0.0)
        key = tl.load(latents_ptr + places + C + rest[None, :], mask=valid[:, None] & is_rest[None, :], other=0.0)
        logits = tl.dot(latent, q)
        logits = tl.dot(key, q_rest, acc=logits) * SCALE  # of base 2
        logits = tl.where(offsets[:, None] < limits[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 0))
        weights = tl.exp2(logits - new_top[None, :])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink[None, :]
        acc = tl.dot(tl.trans(latent), weights.to(latent.dtype), acc=acc)
        top = new_top
    return top, total, acc


@triton.jit
def _share(num_keys: tl.tensor, num_splits: tl.tensor, KEYS: tl.constexpr) -> tl.tensor:
    """Keys of each block of a request: whole steps of the loop."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, num_splits), KEYS), 1) * KEYS


@triton.jit
def _decode_kernel(
    q_ptr: tl.tensor,
    latents_ptr: tl.tensor,
    table_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    table_stride: tl.tensor,
    num_splits: tl.tensor,
    SCALE: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    PADDED_C: tl.constexpr,
    PADDED_REST: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (tile of heads, request, split): tiles that read the same keys are next to each other."""
    row = tl.program_id(1)
    split = tl.program_id(2)
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    num_keys = tl.load(seq_lens_ptr + row)
    share = _share(num_keys, num_splits, KEYS)
    start = split * share
    if start < num_keys:
        members = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        is_head = members < H
        heads = row.to(tl.int64) * H + members
        end = tl.minimum(start + share, num_keys)
        limits = tl.zeros((ROWS,), tl.int32) + end
        top, total, acc = _attend(
            q_ptr,
            latents_ptr,
            table_ptr + row.to(tl.int64) * table_stride,
            heads,
            is_head,
            limits,
            start,
            end,
            SCALE,
            D,
            C,
            PADDED_C,
            PADDED_REST,
            PAGE,
            ROWS,
            KEYS,
            STAGES,
        )
        columns = tl.arange(0, PADDED_C)
        is_stored = is_head[None, :] & (columns < C)[:, None]
        if share >= num_keys:
            out = (acc / total[None, :]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + heads[None, :] * C + columns[:, None], out, mask=is_stored)
        else:
            parts = (row.to(tl.int64) * num_splits + split) * H + members
            tl.store(partial_ptr + parts[None, :] * C + columns[:, None], acc, mask=is_stored)
            tl.store(tops_ptr + parts, top, mask=is_head)
            tl.store(totals_ptr + parts, total, mask=is_head)


@triton.jit
def _sum_kernel(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    num_splits: tl.tensor,
    H: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (columns, request, tile of heads): adds up the request's blocks, where it has several."""
    row = tl.program_id(1)
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    num_keys = tl.load(seq_lens_ptr + row)
    share = _share(num_keys, num_splits, KEYS)
    if share < num_keys:
        members = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        is_head = members < H
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        is_stored = is_head[:, None] & (columns < C)[None, :]
        num_active = tl.cdiv(num_keys, share)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, num_active, AT_ONCE):
            splits = first + tl.arange(0, AT_ONCE)
            parts = (row.to(tl.int64) * num_splits + splits[:, None]) * H + members[None, :]
            is_part = (splits < num_active)[:, None] & is_head[None, :]
            tops = tl.load(tops_ptr + parts, mask=is_part, other=float("-inf"))
            totals = tl.load(totals_ptr + parts, mask=is_part, other=0.0)
            sums_ptr = partial_ptr + parts[:, :, None] * C + columns[None, None, :]
            sums = tl.load(sums_ptr, mask=is_part[:, :, None] & is_stored[None, :, :], other=0.0)
            new_top = tl.where(is_head, tl.maximum(top, tl.max(tops, 0)), 0.0)
            shrink = tl.exp2(top - new_top)
            factors = tl.exp2(tops - new_top[None, :])
            total = total * shrink + tl.sum(totals * factors, 0)
            acc = acc * shrink[:, None] + tl.sum(sums * factors[:, :, None], 0)
            top = new_top
        heads = row.to(tl.int64) * H + members
        out = (acc / tl.where(is_head, total, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + heads[:, None] * C + columns[None, :], out, mask=is_stored)


@triton.jit
def _prefill_kernel(
    q_ptr: tl.tensor,
    latents_ptr: tl.tensor,
    table_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    out_ptr: tl.tensor,
    table_stride: tl.tensor,
    SCALE: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    PADDED_C: tl.constexpr,
    PADDED_REST: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (tile): the heads of some of a request's new tokens, causal."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    tile_ptr = tiles_ptr + tl.program_id(0) * 4
    row = tl.load(tile_ptr)
    first_token = tl.load(tile_ptr + 1)
    num_tokens = tl.load(tile_ptr + 2)
    members = tl.load(tile_ptr + 3) + tl.arange(0, ROWS)
    is_head = members < num_tokens * H
    heads = first_token.to(tl.int64) * H + members
    num_keys = tl.load(seq_lens_ptr + row)
    limits = tl.minimum(num_keys - num_tokens + members // H + 1, num_keys)
    _, total, acc = _attend(
        q_ptr,
        latents_ptr,
        table_ptr + row.to(tl.int64) * table_stride,
        heads,
        is_head,
        limits,
        0,
        tl.max(limits, 0),
        SCALE,
        D,
        C,
        PADDED_C,
        PADDED_REST,
        PAGE,
        ROWS,
        KEYS,
        STAGES,
    )
    columns = tl.arange(0, PADDED_C)
    out = (acc / total[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + heads[None, :] * C + columns[:, None], out, mask=is_head[None, :] & (columns < C)[:, None])


def _widths(width: int, value_width: int) -> dict[str, int]:
    """The kernels' constants for these widths of keys and values."""
    return {
        "D": width,
        "C": value_width,
        "PADDED_C": max(_MIN_DOT_WIDTH, triton.next_power_of_2(value_width)),
        "PADDED_REST": max(_MIN_DOT_WIDTH, triton.next_power_of_2(width - value_width)),
    }


@triton_op("mllm::latent_decode", mutates_args={"out", "partial", "tops", "totals"})
def latent_decode(
    q: torch.Tensor,
    latents: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    partial: torch.Tensor,
    tops: torch.Tensor,
    totals: torch.Tensor,
    page_size: int,
    sm_scale: float,
) -> None:
    """Attention of one new token a request over its latents, the token's own included.

    Args:
        q: [R, H, D]; latents: [P, 1, D]; both contiguous and of one dtype.
        page_table: [R, W] int32, the pages of each request, contiguous; seq_lens: [R] int32; with 0
            a row is passed over and its output left as it is.
        out: [R, H, C], contiguous, written; C < D.
        partial: [X] float32, tops and totals [R, N, H] float32: scratch; X at least R * N * H * C where N > 1.
        page_size: tokens of a page.
        sm_scale: factor of the products.
    """
    num_rows, num_heads, width = q.shape
    value_width = out.shape[2]
    num_splits = tops.shape[1]
    tile = decode_tile(num_heads)
    num_tiles = num_decode_tiles(num_heads)
    wrap_triton(_decode_kernel)[(num_tiles, num_rows, num_splits)](
        q,
        latents,
        page_table,
        seq_lens,
        out,
        partial,
        tops,
        totals,
        page_table.shape[1],
        num_splits,
        SCALE=sm_scale * _LOG2_E,
        H=num_heads,
        **_widths(width, value_width),
        PAGE=page_size,
        ROWS=tile.rows,
        KEYS=tile.keys,
        STAGES=tile.stages,
        EARLY=starts_early(),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    columns = _SUMMED_NUMBERS // tile.rows
    wrap_triton(_sum_kernel)[(triton.cdiv(value_width, columns), num_rows, num_tiles)](
        out,
        partial,
        tops,
        totals,
        seq_lens,
        num_splits,
        H=num_heads,
        C=value_width,
        COLUMNS=columns,
        AT_ONCE=_SUMMED_AT_ONCE,
        ROWS=tile.rows,
        KEYS=tile.keys,
        EARLY=starts_early(),
        num_warps=4,
    )


@triton_op("mllm::latent_prefill", mutates_args={"out"})
def latent_prefill(
    q: torch.Tensor,
    latents: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    page_size: int,
    sm_scale: float,
) -> None:
    """Causal attention of several new tokens a request over its latents, these tokens' included.

    Args:
        q: [T, H, D]; latents: [P, 1, D]; both contiguous and of one dtype.
        page_table: [R, W] int32, the pages of each request, contiguous; seq_lens: [R] int32, new tokens included.
        tiles: [N, 4] int32: for each block its request, the request's first token in q, its number of new tokens, and
            the first of the block's PREFILL_TILE.rows query heads, counted over these tokens.
        out: [T, H, C], contiguous, written where tiles are; C < D.
        page_size, sm_scale: as latent_decode's.
    """
    _, num_heads, width = q.shape
    wrap_triton(_prefill_kernel)[(tiles.shape[0],)](
        q,
        latents,
        page_table,
        seq_lens,
        tiles,
        out,
        page_table.shape[1],
        SCALE=sm_scale * _LOG2_E,
        H=num_heads,
        **_widths(width, out.shape[2]),
        PAGE=page_size,
        ROWS=PREFILL_TILE.rows,
        KEYS=PREFILL_TILE.keys,
        STAGES=PREFILL_TILE.stages,
        EARLY=starts_early(),
        num_warps=PREFILL_TILE.warps,
        num_stages=PREFILL_TILE.stages,
    )
