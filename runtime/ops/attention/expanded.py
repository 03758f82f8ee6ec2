"""Attention of prompts over keys and values that were made of latents: one product's rows, in a row for each token.

A block has some tokens of one head of one prompt, and the keys that these see of the part at hand, or a share of them.
The rotated part of keys, which all heads share, is read where the latents are. A block adds to the result of an earlier
part.

Shape legend: T tokens, K keys of a part, N tiles, S blocks that share a tile's keys, H query heads, Q width of queries,
V of values, W of latents with the rotated part R beside them; Q - R columns of a key are not rotated (NOPE).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.attention.latent.tiles import TILE_FIELDS, expanded_tile
from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites

_MIN_DOT_WIDTH = 16  # of tl.dot
_LOG2_E = math.log2(math.e)
_LEAST = -1e30  # a logit that weighs nothing; infinite ones have no differences


@triton.jit
def _attend(
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    q: tl.tensor,
    q_rest: tl.tensor,
    own_ptr: tl.tensor,
    rest_ptr: tl.tensor,
    limits: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    num_keys: tl.tensor,
    SCALE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    REST_STRIDE: tl.constexpr,
    NOPE: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    PADDED_NOPE: tl.constexpr,
    PADDED_R: tl.constexpr,
    PADDED_V: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(largest logit, sum, weighted values [ROWS, V]) with the keys start … end, a multiple of KEYS each or the last;
    without MASKED every row sees all of them."""
    nope = tl.arange(0, PADDED_NOPE)
    rest = tl.arange(0, PADDED_R)
    columns = tl.arange(0, PADDED_V)
    block = tl.arange(0, KEYS)
    for offset in tl.range(start, end, KEYS, num_stages=STAGES):
        offsets = offset + block
        is_key = offsets < num_keys
        key_ptrs = own_ptr + offsets * KEY_STRIDE
        key = _load(
            key_ptrs[:, None] + nope[None, :], is_key[:, None], (nope < NOPE)[None, :], MASKED, NOPE == PADDED_NOPE
        )
        rest_ptrs = rest_ptr + offsets * REST_STRIDE
        key_rest = _load(
            rest_ptrs[:, None] + rest[None, :], is_key[:, None], (rest < R)[None, :], MASKED, R == PADDED_R
        )
        value = _load(
            key_ptrs[:, None] + NOPE + columns[None, :],
            is_key[:, None],
            (columns < V)[None, :],
            MASKED,
            V == PADDED_V,
        )
        logits = tl.dot(q, tl.trans(key))
        logits = tl.dot(q_rest, tl.trans(key_rest), acc=logits) * SCALE  # of base 2
        if MASKED:
            logits = tl.where(offsets[None, :] < limits[:, None], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        weights = tl.exp2(logits - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(value.dtype), value, acc=acc)
        top = new_top
    return top, total, acc


@triton.jit
def _load(
    ptrs: tl.tensor, is_row: tl.tensor, is_column: tl.tensor, MASKED: tl.constexpr, IS_WHOLE: tl.constexpr
) -> tl.tensor:
    """Rows of keys: all of them are there unless MASKED, and all columns with IS_WHOLE."""
    if IS_WHOLE:
        if MASKED:
            return tl.load(ptrs, mask=is_row, other=0.0)
        return tl.load(ptrs)
    if MASKED:
        return tl.load(ptrs, mask=is_row & is_column, other=0.0)
    return tl.load(ptrs, mask=is_column, other=0.0)


@triton.jit
def _expanded_kernel(
    q_ptr: tl.tensor,
    expanded_ptr: tl.tensor,
    gathered_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    out_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    num_splits: tl.tensor,
    SCALE: tl.constexpr,
    H: tl.constexpr,
    NOPE: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    PADDED_NOPE: tl.constexpr,
    PADDED_R: tl.constexpr,
    PADDED_V: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    FIELDS: tl.constexpr,
    LEAST: tl.constexpr,
    LN_2: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (tile, head, share): blocks of one head are next to each other, as they read the same keys."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    head = tl.program_id(1)
    split = tl.program_id(2)
    tile_ptr = tiles_ptr + tl.program_id(0) * FIELDS
    first_token = tl.load(tile_ptr)
    num_rows = tl.load(tile_ptr + 1)
    first_key = tl.load(tile_ptr + 2).to(tl.int64)
    num_keys = tl.load(tile_ptr + 3)
    seen = tl.load(tile_ptr + 4)
    is_added = tl.load(tile_ptr + 5)
    rows = tl.arange(0, ROWS)
    is_row = rows < num_rows
    tokens = (first_token + rows).to(tl.int64)
    nope = tl.arange(0, PADDED_NOPE)
    rest = tl.arange(0, PADDED_R)
    columns = tl.arange(0, PADDED_V)
    q_ptrs = q_ptr + (tokens * H + head)[:, None] * (NOPE + R)
    q = tl.load(q_ptrs + nope[None, :], mask=is_row[:, None] & (nope < NOPE)[None, :], other=0.0)
    q_rest = tl.load(q_ptrs + NOPE + rest[None, :], mask=is_row[:, None] & (rest < R)[None, :], other=0.0)
    limits = tl.minimum(seen + rows, num_keys)
    last = tl.minimum(seen + num_rows - 1, num_keys)
    share = tl.cdiv(tl.cdiv(last, num_splits), KEYS) * KEYS
    start = tl.minimum(split * share, last)
    end = tl.minimum(start + share, last)
    # Keys before it all rows see.
    middle = tl.minimum(tl.maximum(tl.minimum(seen, num_keys) // KEYS * KEYS, start), end)
    own_ptr = expanded_ptr + first_key * (H * (NOPE + V)) + head * (NOPE + V)
    rest_ptr = gathered_ptr + first_key * W + (W - R)
    top = tl.full((ROWS,), LEAST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, PADDED_V), tl.float32)
    top, total, acc = _attend(
        top,
        total,
        acc,
        q,
        q_rest,
        own_ptr,
        rest_ptr,
        limits,
        start,
        middle,
        num_keys,
        SCALE,
        H * (NOPE + V),
        W,
        NOPE,
        R,
        V,
        PADDED_NOPE,
        PADDED_R,
        PADDED_V,
        KEYS,
        STAGES,
        False,
    )
    top, total, acc = _attend(
        top,
        total,
        acc,
        q,
        q_rest,
        own_ptr,
        rest_ptr,
        limits,
        middle,
        end,
        num_keys,
        SCALE,
        H * (NOPE + V),
        W,
        NOPE,
        R,
        V,
        PADDED_NOPE,
        PADDED_R,
        PADDED_V,
        KEYS,
        STAGES,
        True,
    )
    # Rows without keys among these have a result of 0, which weighs nothing.
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    log_sums = (top + tl.log2(total)) * LN_2
    places = (tokens * H + head) * num_splits + split
    out_ptrs = out_ptr + places[:, None] * V + columns[None, :]
    is_stored = is_row[:, None] & (columns < V)[None, :]
    if is_added != 0:
        before = tl.load(log_sums_ptr + places, mask=is_row, other=0.0)
        earlier = tl.load(out_ptrs, mask=is_stored, other=0.0).to(tl.float32)
        largest = tl.maximum(tl.maximum(before, log_sums), LEAST)
        of_earlier = tl.exp(before - largest)
        of_these = tl.exp(log_sums - largest)
        both = of_earlier + of_these
        out = (earlier * of_earlier[:, None] + out * of_these[:, None]) / tl.where(both > 0, both, 1.0)[:, None]
        log_sums = largest + tl.log(both)
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_stored)
    tl.store(log_sums_ptr + places, log_sums, mask=is_row)


@triton_op("mllm::expanded_prefill", mutates_args={"out", "log_sums"})
def expanded_prefill(
    q: torch.Tensor,
    expanded: torch.Tensor,
    gathered: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    log_sums: torch.Tensor,
    sm_scale: float,
) -> None:
    """Causal attention of prompts over a part of the keys that they see.

    Args:
        q: [T, H, Q]; expanded: [K, H, Q - R + V], a head's columns that are not rotated of a key and its values;
            gathered: [K, W]; the last R columns are of keys that all heads share. Contiguous and of one dtype.
        tiles: [N, TILE_FIELDS] int32. Each block of a head has its first token, its number of tokens (up to
            tiles.EXPANDED_ROWS), the prompt's first key in `expanded`, its number of keys there, and the number that
            the first token sees, at least one (each further token sees one more, up to all). A last field says whether
            the tokens have a result of earlier keys, which is added up.
        out: [T, H, S, V], contiguous, written where tiles are, by S blocks with a share of the keys each.
        log_sums: [T, H, S] float32, written likewise: the natural logarithm of the sum of exponentials, -inf where a
            block has no keys, and 0 for a result.
        sm_scale: factor of the products.
    """
    _, num_heads, width = q.shape
    num_splits, value_width = out.shape[2:]
    nope = expanded.shape[2] - value_width
    padded = [max(_MIN_DOT_WIDTH, triton.next_power_of_2(size)) for size in (nope, width - nope, value_width)]
    tile = expanded_tile(padded[0] + padded[1], padded[2], starts_early())
    wrap_triton(_expanded_kernel)[(tiles.shape[0], num_heads, num_splits)](
        q,
        expanded,
        gathered,
        tiles,
        out,
        log_sums,
        num_splits,
        SCALE=sm_scale * _LOG2_E,
        H=num_heads,
        NOPE=nope,
        R=width - nope,
        V=value_width,
        W=gathered.shape[1],
        PADDED_NOPE=padded[0],
        PADDED_R=padded[1],
        PADDED_V=padded[2],
        ROWS=tile.rows,
        KEYS=tile.keys,
        STAGES=tile.stages,
        FIELDS=TILE_FIELDS,
        LEAST=_LEAST,
        LN_2=math.log(2),
        EARLY=starts_early(),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
