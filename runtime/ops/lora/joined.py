"""Kernels that join what adapters change of many tokens with what is between two linears: residual, norm, the next A.

Between two linears adapters have an expand, a residual, a norm, a shrink and its sum. Here the expand adds the residual
and leaves sums of squares of what it writes. So the norm goes through a row once, and multiplies it with A meanwhile.

Shape legend: as stretches.py; R rows of the next A, C sums of squares a token.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.lora.expand import factors_of
from mllm_compile.runtime.ops.lora.shapes import (
    APART_TOKENS,
    MOST_SLOTS,
    WRITTEN_TOKENS,
    norm_columns,
    padded_rank,
    stages_of_norm,
)
from mllm_compile.runtime.ops.lora.shrink import NO_SLOT
from mllm_compile.runtime.ops.lora.stretches import most_shared, written


@triton.jit
def norm_shrink_kernel(
    h_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    a_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    out_ptr: tl.tensor,
    shrunk_ptr: tl.tensor,
    num_tokens: tl.tensor,
    EPS: tl.constexpr,
    NORM_SUMS: tl.constexpr,
    N: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    APART_TOKENS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """BLOCK_T tokens normed, and times BLOCK_R rows of A: program (tokens and slot, rows of A).

    The first rows' blocks store what is normed. Up to APART_TOKENS a block has one of the SLOTS, and the first slot's
    stores; in longer steps it goes through those of its tokens.
    """
    are_apart = num_tokens <= APART_TOKENS
    num_blocks = tl.cdiv(num_tokens, BLOCK_T)
    own_slot = tl.program_id(0) // num_blocks
    if (own_slot > 0) & ((are_apart == 0) | (own_slot >= SLOTS)):
        return
    first = (tl.program_id(0) % num_blocks).to(tl.int64) * BLOCK_T
    tokens, rows = tl.arange(0, BLOCK_T), tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_token, is_row = first + tokens < num_tokens, rows < ROWS
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    slots = tl.load(slots_ptr + first + tokens, mask=is_token, other=-1)
    if SLOTS > 1:
        slots = tl.where((are_apart == 0) | (slots == own_slot), slots, -1)
    slot = tl.min(tl.where(slots >= 0, slots, NO_SLOT))
    is_stored = (own_slot == 0) & (tl.program_id(1) == 0)
    if (is_stored == 0) & (slot == NO_SLOT):
        return
    stored = is_token & is_stored
    factors = factors_of(squares_ptr + first * NORM_SUMS, tokens, is_token, EPS, NORM_SUMS, N)
    of_h, of_out = h_ptr + first * N, out_ptr + first * N
    products = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    goes_on = slot >= 0
    while goes_on:
        of_slot = a_ptr + tl.where(slot < NO_SLOT, slot, 0).to(tl.int64) * ROWS * N
        has_a = is_row & (slot < NO_SLOT)
        total = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
        for k in tl.range(0, N, BLOCK_K, num_stages=STAGES):
            columns = k + tl.arange(0, BLOCK_K)
            places = tokens[:, None] * N + columns[None, :]
            h = tl.load(of_h + places, mask=is_token[:, None], other=0.0)
            weight = tl.load(norm_ptr + columns).to(tl.float32)
            a = tl.load(of_slot + (rows[None, :] * N + columns[:, None]), mask=has_a[None, :], other=0.0)
            values = h.to(tl.float32) * factors[:, None]
            normed = (values * weight + values if PLUS_ONE else values * weight).to(h.dtype)
            tl.store(of_out + places, normed, mask=stored[:, None])
            total = tl.dot(normed, a, total, input_precision="ieee" if EXACT else "tf32")
        products = tl.where((slots == slot)[:, None], total, products)
        slot = tl.min(tl.where(slots > slot, slots, NO_SLOT))
        stored = stored & (tokens < 0)
        goes_on = slot < NO_SLOT
    of_block = shrunk_ptr + first * ROWS + (tokens[:, None] * ROWS + rows[None, :])
    tl.store(of_block, products.to(shrunk_ptr.dtype.element_ty), mask=(slots >= 0)[:, None] & is_row[None, :])


@triton_op("mllm::lora_expand_residual", mutates_args={})
def lora_expand_residual(
    y: torch.Tensor, shrunk: torch.Tensor, b: torch.Tensor, slots: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A residual plus lora_expand of all outputs, of many tokens; and sums of squares of that.

    Args:
        y, residual: [..., N] of T tokens; shrunk: [1, T, r]; b: [L, N, r]; slots: [T] int32.

    Returns:
        [..., N] in the dtype of y, y and what is added rounded first; [..., C] float32.
    """
    out, squares = written(y.contiguous(), shrunk, b, slots, [0], [y.shape[-1]], residual.contiguous())
    assert squares is not None, "there is a residual"
    return out, squares


@triton_op("mllm::lora_norm_shrink", mutates_args={})
def lora_norm_shrink(
    h: torch.Tensor,
    squares: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    plus_one: bool,
    a: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """An RMS norm of many tokens, and lora_shrink of it.

    Args:
        h: [..., N] of T tokens, norm_columns(N) is not 0; squares: [..., C] float32, sums of squares of h.
        norm_weight: [N]; with `plus_one` 1 is added to it.
        a: [L, R, N]; slots: [T] int32.

    Returns:
        [..., N] in the dtype of h, rounded once; [1, T, R] in that dtype, any bits where the slot is -1.
    """
    h = h.contiguous()
    inputs, rows, num_tokens, num_slots = h.shape[-1], a.shape[1], math.prod(h.shape[:-1]), a.shape[0]
    slots_apart = num_slots if num_slots <= MOST_SLOTS else 1
    out, block_r = torch.empty_like(h), padded_rank(rows)
    shrunk = torch.empty((1, num_tokens, rows), dtype=h.dtype, device=h.device)
    further = APART_TOKENS // WRITTEN_TOKENS * (slots_apart - 1)  # blocks of a short step
    grid = triton.cdiv(num_tokens, WRITTEN_TOKENS) + further, triton.cdiv(rows, block_r)
    wrap_triton(norm_shrink_kernel)[grid](
        h,
        squares,
        norm_weight,
        a,
        slots,
        out,
        shrunk,
        num_tokens,
        EPS=eps,
        NORM_SUMS=squares.shape[-1],
        N=inputs,
        PLUS_ONE=plus_one,
        ROWS=rows,
        SLOTS=slots_apart,
        APART_TOKENS=APART_TOKENS,
        BLOCK_T=WRITTEN_TOKENS,
        BLOCK_R=block_r,
        BLOCK_K=norm_columns(inputs),
        STAGES=stages_of_norm(inputs, rows, h.element_size(), most_shared()),
        EXACT=h.dtype == torch.float32,
        EARLY=starts_early(),
        num_warps=8,
    )
    return out, shrunk
