"""Kernels for what adapters add to a linear: one multiplies with A of each token's adapter, one with B. The second one
has a form that ends with the activation of a feed-forward.

Triton by hand, as `torch.library.triton_op`, so that AOTInductor puts the compiled kernels into the piece's package.
Only the piece compiler imports this module: a loaded package needs neither Triton nor these ops.

A block has some tokens, and goes through the different adapters that these have. So a step of one adapter reads its
factors once for each block, and a token's numbers do not depend on other tokens. Sums are made without atomics, and so
are the same every time.

Shape legend: T tokens, K inputs and N outputs of a linear, P of its parts with adapters, r their rank, L slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.lora.shapes import MOST_PARTS, block_of_columns, num_splits, padded_rank

_NO_SLOT = tl.constexpr(1 << 30)  # above all
_FEW_TOKENS, _MANY_TOKENS = 16, 64  # of a block
_GATED_COLUMNS = 64  # of a block, of gate and of up each


@triton.jit
def _shrink_kernel(
    x_ptr: tl.tensor,
    a_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXACT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """BLOCK_T tokens times BLOCK_R rows of A, over INPUTS of the K inputs."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    rows = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    start = tl.program_id(2) * INPUTS
    is_token, is_row = tokens < num_tokens, rows < ROWS
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    slots = tl.load(slots_ptr + tokens, mask=is_token, other=-1)
    out = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    slot = tl.min(tl.where(slots >= 0, slots, _NO_SLOT))
    while slot < _NO_SLOT:
        of_slot = a_ptr + slot.to(tl.int64) * ROWS * K
        total = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
        for k in range(0, INPUTS, BLOCK_K):
            columns = start + k + tl.arange(0, BLOCK_K)
            is_column = (k + tl.arange(0, BLOCK_K) < INPUTS) & (columns < K)
            x_mask = is_token[:, None] & is_column[None, :]
            x = tl.load(x_ptr + tokens[:, None] * K + columns[None, :], mask=x_mask, other=0.0)
            a_mask = is_column[:, None] & is_row[None, :]
            a = tl.load(of_slot + rows[None, :] * K + columns[:, None], mask=a_mask, other=0.0)
            total = tl.dot(x, a, total, input_precision="ieee" if EXACT else "tf32")
        out = tl.where((slots == slot)[:, None], total, out)
        slot = tl.min(tl.where(slots > slot, slots, _NO_SLOT))
    places = (tl.program_id(2) * num_tokens + tokens[:, None]) * ROWS + rows[None, :]
    tl.store(out_ptr + places, out, mask=is_token[:, None] & is_row[None, :])


@triton.jit
def _times_b(
    shrunk_ptr: tl.tensor,
    of_slot: tl.tensor,
    tokens: tl.tensor,
    is_token: tl.tensor,
    num_tokens: tl.tensor,
    part: tl.tensor,
    b_rows: tl.tensor,
    RANK: tl.constexpr,
    A_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    EXACT: tl.constexpr,
) -> tl.tensor:
    """[BLOCK_T, BLOCK_N] float32: rows of a slot's B times what the tokens have of a part's A."""
    total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for r in tl.static_range(0, RANK, BLOCK_R):
        ranks = r + tl.arange(0, BLOCK_R)
        is_rank = ranks < RANK
        shrunk_mask = is_token[:, None] & is_rank[None, :]
        shrunk = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
        for split in tl.static_range(SPLITS):
            of_split = (split * num_tokens + tokens[:, None]) * A_ROWS + part * RANK + ranks[None, :]
            shrunk += tl.load(shrunk_ptr + of_split, mask=shrunk_mask, other=0.0)
        b_places = b_rows[None, :] * RANK + ranks[:, None]
        b = tl.load(of_slot + b_places, mask=is_rank[:, None], other=0.0)
        total = tl.dot(shrunk.to(b.dtype), b, total, input_precision="ieee" if EXACT else "tf32")
    return total


@triton.jit
def _expand_kernel(
    y_ptr: tl.tensor,
    shrunk_ptr: tl.tensor,
    b_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    N: tl.constexpr,
    B_ROWS: tl.constexpr,
    RANK: tl.constexpr,
    A_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    START_0: tl.constexpr,
    START_1: tl.constexpr,
    START_2: tl.constexpr,
    START_3: tl.constexpr,
    ROWS_0: tl.constexpr,
    ROWS_1: tl.constexpr,
    ROWS_2: tl.constexpr,
    ROWS_3: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    EXACT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """BLOCK_N outputs of BLOCK_T tokens, all in one part or in none."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    first = tl.program_id(1) * BLOCK_N
    in_0 = (first >= START_0) & (first < START_0 + ROWS_0)
    in_1 = (first >= START_1) & (first < START_1 + ROWS_1)
    in_2 = (first >= START_2) & (first < START_2 + ROWS_2)
    in_3 = (first >= START_3) & (first < START_3 + ROWS_3)
    part = tl.where(in_0, 0, tl.where(in_1, 1, tl.where(in_2, 2, tl.where(in_3, 3, -1))))
    b_first = tl.where(in_1, first - START_1 + ROWS_0, first - START_0)
    b_first = tl.where(in_2, first - START_2 + ROWS_0 + ROWS_1, b_first)
    b_first = tl.where(in_3, first - START_3 + ROWS_0 + ROWS_1 + ROWS_2, b_first)
    is_token = tokens < num_tokens
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    columns = first + tl.arange(0, BLOCK_N)
    places = tokens[:, None].to(tl.int64) * N + columns[None, :]
    y = tl.load(y_ptr + places, mask=is_token[:, None], other=0.0)
    slots = tl.load(slots_ptr + tokens, mask=is_token, other=-1)
    added = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    slot = tl.min(tl.where(slots >= 0, slots, _NO_SLOT))
    slot = tl.where(part >= 0, slot, _NO_SLOT)
    b_rows = b_first + tl.arange(0, BLOCK_N)
    while slot < _NO_SLOT:
        of_slot = b_ptr + slot.to(tl.int64) * B_ROWS * RANK
        total = _times_b(
            shrunk_ptr, of_slot, tokens, is_token, num_tokens, part, b_rows,
            RANK, A_ROWS, SPLITS, BLOCK_T, BLOCK_N, BLOCK_R, EXACT,
        )  # fmt: skip
        added = tl.where((slots == slot)[:, None], total, added)
        slot = tl.min(tl.where(slots > slot, slots, _NO_SLOT))
    out = tl.where((slots >= 0)[:, None] & (part >= 0), y.to(tl.float32) + added, y.to(tl.float32))
    tl.store(out_ptr + places, out.to(y.dtype), mask=is_token[:, None])


@triton.jit
def _expand_gated_kernel(
    y_ptr: tl.tensor,
    shrunk_ptr: tl.tensor,
    b_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    N: tl.constexpr,
    B_ROWS: tl.constexpr,
    RANK: tl.constexpr,
    A_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_UP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    EXACT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """BLOCK_N of the N columns of gate and of up; roundings are where the two kernels have them."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_token = tokens < num_tokens
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    places = tokens[:, None].to(tl.int64) * 2 * N + columns[None, :]
    gate = tl.load(y_ptr + places, mask=is_token[:, None], other=0.0)
    up = tl.load(y_ptr + places + N, mask=is_token[:, None], other=0.0)
    slots = tl.load(slots_ptr + tokens, mask=is_token, other=-1)
    of_gate = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    of_up = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    slot = tl.min(tl.where(slots >= 0, slots, _NO_SLOT))
    while slot < _NO_SLOT:
        of_slot = b_ptr + slot.to(tl.int64) * B_ROWS * RANK
        if HAS_GATE:
            total = _times_b(
                shrunk_ptr, of_slot, tokens, is_token, num_tokens, 0, columns,
                RANK, A_ROWS, SPLITS, BLOCK_T, BLOCK_N, BLOCK_R, EXACT,
            )  # fmt: skip
            of_gate = tl.where((slots == slot)[:, None], total, of_gate)
        if HAS_UP:
            total = _times_b(
                shrunk_ptr, of_slot, tokens, is_token, num_tokens, HAS_GATE, columns + HAS_GATE * N,
                RANK, A_ROWS, SPLITS, BLOCK_T, BLOCK_N, BLOCK_R, EXACT,
            )  # fmt: skip
            of_up = tl.where((slots == slot)[:, None], total, of_up)
        slot = tl.min(tl.where(slots > slot, slots, _NO_SLOT))
    gate = (gate.to(tl.float32) + of_gate).to(gate.dtype).to(tl.float32)
    up = (up.to(tl.float32) + of_up).to(up.dtype)
    silu = gate / (1.0 + tl.exp(-gate))
    out_places = tokens[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(out_ptr + out_places, silu.to(up.dtype) * up, mask=is_token[:, None])


@triton_op("mllm::lora_shrink", mutates_args={})
def lora_shrink(x: torch.Tensor, a: torch.Tensor, slots: torch.Tensor, is_few: bool) -> torch.Tensor:
    """Products of x [..., K] of T tokens with A [L, P * r, K] of each token's slot [T] int32; 0 where that is -1.

    Args:
        is_few: right for any number of tokens, fast up to MOST_FEW_TOKENS.

    Returns:
        [S, T, P * r] float32: S sums over some of the inputs each.
    """
    x = x.contiguous()
    inputs, rows, num_tokens = x.shape[-1], a.shape[1], math.prod(x.shape[:-1])
    splits = num_splits(inputs, is_few)
    of_a_split = triton.cdiv(inputs, splits)
    block_t = _FEW_TOKENS if is_few else _MANY_TOKENS
    block_r = padded_rank(rows)
    out = torch.empty((splits, num_tokens, rows), dtype=torch.float32, device=x.device)
    wrap_triton(_shrink_kernel)[(triton.cdiv(num_tokens, block_t), triton.cdiv(rows, block_r), splits)](
        x,
        a,
        slots,
        out,
        num_tokens,
        K=inputs,
        ROWS=rows,
        INPUTS=of_a_split,
        BLOCK_T=block_t,
        BLOCK_R=block_r,
        BLOCK_K=64 if x.dtype == torch.float32 else 128,
        EXACT=x.dtype == torch.float32,
        EARLY=starts_early(),
        num_warps=4,
        num_stages=3,
    )
    return out


@triton_op("mllm::lora_expand", mutates_args={})
def lora_expand(
    y: torch.Tensor,
    shrunk: torch.Tensor,
    b: torch.Tensor,
    slots: torch.Tensor,
    starts: Sequence[int],
    rows: Sequence[int],
) -> torch.Tensor:
    """y + B of each token's slot times what lora_shrink gave of it.

    Args:
        y: [..., N] of T tokens; shrunk: [S, T, P * r] of any type; b: [L, sum of rows, r]; slots: [T] int32.
        starts, rows: [P] the outputs of each part; takes_lora says which are taken.

    Returns:
        [..., N] in the dtype of y.
    """
    y = y.contiguous()
    outputs, num_tokens = y.shape[-1], math.prod(y.shape[:-1])
    rank, splits = b.shape[2], shrunk.shape[0]
    block_n = block_of_columns(outputs, starts, rows)
    block_t = _FEW_TOKENS if splits > 1 else _MANY_TOKENS
    none = [0] * (MOST_PARTS - len(rows))
    start_0, start_1, start_2, start_3 = (*starts, *none)
    rows_0, rows_1, rows_2, rows_3 = (*rows, *none)
    out = torch.empty_like(y)
    wrap_triton(_expand_kernel)[(triton.cdiv(num_tokens, block_t), outputs // block_n)](
        y,
        shrunk,
        b,
        slots,
        out,
        num_tokens,
        N=outputs,
        B_ROWS=b.shape[1],
        RANK=rank,
        A_ROWS=shrunk.shape[2],
        SPLITS=splits,
        START_0=start_0,
        START_1=start_1,
        START_2=start_2,
        START_3=start_3,
        ROWS_0=rows_0,
        ROWS_1=rows_1,
        ROWS_2=rows_2,
        ROWS_3=rows_3,
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        BLOCK_R=padded_rank(rank),
        EXACT=y.dtype == torch.float32,
        EARLY=starts_early(),
        num_warps=4,
    )
    return out


@triton_op("mllm::lora_expand_gated", mutates_args={})
def lora_expand_gated(
    y: torch.Tensor,
    shrunk: torch.Tensor,
    b: torch.Tensor,
    slots: torch.Tensor,
    starts: Sequence[int],
    rows: Sequence[int],
) -> torch.Tensor:
    """silu(gate) * up of what lora_expand gives, whose halves they are, gate first.

    Args:
        y, shrunk, b, slots: as lora_expand's.
        starts, rows: of one half or of both; takes_gated says which are taken.

    Returns:
        [..., N / 2] in the dtype of y.
    """
    y = y.contiguous()
    columns, num_tokens = y.shape[-1] // 2, math.prod(y.shape[:-1])
    rank, splits = b.shape[2], shrunk.shape[0]
    block_n = min(block_of_columns(columns, [0], [columns]), _GATED_COLUMNS)
    block_t = _FEW_TOKENS if splits > 1 else _MANY_TOKENS
    out = torch.empty((*y.shape[:-1], columns), dtype=y.dtype, device=y.device)
    wrap_triton(_expand_gated_kernel)[(triton.cdiv(num_tokens, block_t), columns // block_n)](
        y,
        shrunk,
        b,
        slots,
        out,
        num_tokens,
        N=columns,
        B_ROWS=b.shape[1],
        RANK=rank,
        A_ROWS=shrunk.shape[2],
        SPLITS=splits,
        HAS_GATE=int(0 in starts),
        HAS_UP=int(columns in starts),
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        BLOCK_R=padded_rank(rank),
        EXACT=y.dtype == torch.float32,
        EARLY=starts_early(),
        num_warps=4,
    )
    return out
