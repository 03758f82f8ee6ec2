"""Attention of packed texts with windows, causality and scores by distance, in a grid by the number of tokens.

Triton by hand, as ops/attention/split_decode.py, which says why. A block has some rows of the packed row for one query
head, whichever texts they are of, and reads the keys that any of them sees. So a CUDA graph of a number of tokens holds
for all lengths of texts, and short texts share a block.

Shape legend: T tokens, H query heads, Hk heads of keys, D head dim, R farthest distance that is told apart, W columns
of distances.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites

_LOG2_E = math.log2(math.e)
_ROWS, _KEYS = 64, 64


@triton.jit
def _text_attention_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    of_queries_ptr: tl.tensor,
    of_keys_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    T: tl.tensor,
    Q_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr,
    K_ROW: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_ROW: tl.constexpr,
    V_HEAD: tl.constexpr,
    SCALE: tl.constexpr,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    FAR: tl.constexpr,
    COLUMNS: tl.constexpr,
    OF_QUERIES: tl.constexpr,
    OF_KEYS: tl.constexpr,
    COLUMNS_FAR: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (query head, tile of rows). LEFT and RIGHT below 0: no window; FAR 0: no bias; SOFT_CAP 0: none,
    else of base 2. of_queries and of_keys
    [T, H, COLUMNS] are scores of each row with a distance's column, read if OF_QUERIES and OF_KEYS say so."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    head = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = rows < T
    low = tl.load(starts_ptr + rows, mask=is_row, other=T).to(tl.int32)
    high = tl.load(ends_ptr + rows, mask=is_row, other=0).to(tl.int32)
    if LEFT >= 0:
        low = tl.maximum(low, rows - LEFT)
    if RIGHT >= 0:
        high = tl.minimum(high, rows + RIGHT + 1)
    begin = tl.min(low, 0)
    end = tl.max(high, 0)
    dims = tl.arange(0, DIMS)
    is_dim = dims < D
    places = rows.to(tl.int64)[:, None]
    q = tl.load(
        q_ptr + places * Q_ROW + head * Q_HEAD + dims[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0
    )
    kv_head = head // GROUP
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIMS), tl.float32)
    for offset in tl.range(begin, end, KEYS, num_stages=STAGES):
        keys = offset + tl.arange(0, KEYS)
        is_read = (keys < end)[:, None] & is_dim[None, :]
        of_keys = keys.to(tl.int64)[:, None]
        k = tl.load(k_ptr + of_keys * K_ROW + kv_head * K_HEAD + dims[None, :], mask=is_read, other=0.0)
        v = tl.load(v_ptr + of_keys * V_ROW + kv_head * V_HEAD + dims[None, :], mask=is_read, other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * SCALE  # of base 2
        if SOFT_CAP > 0:  # tanh(x) = 2 / (1 + exp(-2x)) - 1
            logits = SOFT_CAP * (2.0 / (1.0 + tl.exp2(-2.8853900817779268 / SOFT_CAP * logits)) - 1.0)
        if FAR > 0:
            far = tl.minimum(tl.maximum(keys[None, :] - rows[:, None], -FAR), FAR) + FAR
            bias = tl.load(bias_ptr + head * (2 * FAR + 1) + far).to(tl.float32)
            logits += bias * 1.4426950408889634
        if OF_QUERIES or OF_KEYS:
            far = tl.minimum(tl.maximum(keys[None, :] - rows[:, None], -COLUMNS_FAR), COLUMNS_FAR) + COLUMNS_FAR
            column = tl.load(columns_ptr + far)
            if OF_QUERIES:
                of_row = (places * H + head) * COLUMNS + column
                logits += tl.load(of_queries_ptr + of_row, mask=is_row[:, None], other=0.0).to(tl.float32) * SCALE
            if OF_KEYS:
                of_key = (keys.to(tl.int64)[None, :] * H + head) * COLUMNS + column
                is_known = (keys < end)[None, :]
                logits += tl.load(of_keys_ptr + of_key, mask=is_known, other=0.0).to(tl.float32) * SCALE
        is_seen = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
        logits = tl.where(is_seen, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # of a later text than the tile's first no key came yet
        weights = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        top = new_top
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634 - top)
    out = acc / tl.where(is_row, total, 1.0)[:, None]
    to = out_ptr + (places * H + head) * D + dims[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_dim[None, :])


@triton_op("mllm::text_attention", mutates_args={"out"})
def text_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None,
    distance_keys: torch.Tensor | None,
    distance_queries: torch.Tensor | None,
    distance_columns: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    sm_scale: float,
    window_left: int,
    window_right: int,
    soft_cap: float,
) -> None:
    """Attends within texts: row i to rows i - window_left to i + window_right of its own.

    Args:
        q: [T, H, D]; k, v: [T, Hk, D], of one dtype, a head's numbers side by side; parts of wider rows are read as
            they are.
        starts, ends: [T] int64: where the text of each row begins and ends. A row of padding is a text of its own.
        bias: [H, 2R + 1], added to the scores by distance j - i; those beyond R are as R. Or none.
        distance_keys, distance_queries: [W, H, D], where H is Hk, contiguous; and distance_columns [2R + 1] int64: what
            distance_scores.py has. Or none. Products with all rows are made ahead: [T, H, W] each.
        sinks: [H], a score of each head's that takes part in the softmax and carries no value. Or none.
        out: [T, H, D], contiguous, written.
        sm_scale: factor on q·k.
        window_left, window_right: -1: no bound. A window_right of 0 is causal.
        soft_cap: c of c · tanh(score / c), ahead of what is added to scores; 0: none.
    """
    num_tokens, num_heads, head_dim = q.shape
    is_wide = head_dim > 128
    of_queries = None if distance_keys is None else torch.einsum("thd,whd->thw", q, distance_keys).contiguous()
    of_keys = None if distance_queries is None else torch.einsum("thd,whd->thw", k, distance_queries).contiguous()
    told = of_keys if of_queries is None else of_queries
    wrap_triton(_text_attention_kernel)[(num_heads, triton.cdiv(num_tokens, _ROWS))](
        q,
        k,
        v,
        starts,
        ends,
        q if bias is None else bias,  # which is not read without
        q if of_queries is None else of_queries,
        q if of_keys is None else of_keys,
        starts if distance_columns is None else distance_columns,
        q if sinks is None else sinks,
        out,
        num_tokens,
        Q_ROW=q.stride(0),
        Q_HEAD=q.stride(1),
        K_ROW=k.stride(0),
        K_HEAD=k.stride(1),
        V_ROW=v.stride(0),
        V_HEAD=v.stride(1),
        SCALE=sm_scale * _LOG2_E,
        H=num_heads,
        GROUP=num_heads // k.shape[1],
        D=head_dim,
        DIMS=max(16, triton.next_power_of_2(head_dim)),
        LEFT=window_left,
        RIGHT=window_right,
        FAR=0 if bias is None else bias.shape[1] // 2,
        COLUMNS=0 if told is None else told.shape[2],
        OF_QUERIES=of_queries is not None,
        OF_KEYS=of_keys is not None,
        COLUMNS_FAR=0 if distance_columns is None else distance_columns.shape[0] // 2,
        ROWS=_ROWS,
        KEYS=32 if is_wide else _KEYS,
        STAGES=2,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",  # which products in 16 bits do not read
        SOFT_CAP=soft_cap * _LOG2_E,
        HAS_SINKS=sinks is not None,
        EARLY=starts_early(),
        num_warps=8 if is_wide else 4,
        num_stages=2,
    )
