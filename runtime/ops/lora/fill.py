"""The kernel that writes B times the products with A, of steps of some hundred tokens; it adds up A's sums.

Launches are what such steps wait for, so A's sums have no kernel of their own. Longer steps read each sum in every
block of outputs, where stretches.py's kernel reads it once.

Shape legend: as stretches.py; S sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.lora.shapes import SPLITS_OF_LONG, WRITTEN_TOKENS, block_of_columns, padded_rank
from mllm_compile.runtime.ops.lora.shrink import NO_SLOT
from mllm_compile.runtime.ops.lora.stretches import load_b, part_of, parts_of


@triton.jit
def added_up(
    sums_ptr: tl.tensor,
    tokens: tl.tensor,
    num_tokens: tl.tensor,
    first: tl.tensor,
    ranks: tl.tensor,
    is_rank: tl.tensor,
    A_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,
) -> tl.tensor:
    """[tokens, ranks] float32: products with A from row `first` on, their sums added up in sum_kernel's order."""
    mask = (tokens < num_tokens)[:, None] & is_rank[None, :]
    places = sums_ptr + (tokens[:, None] * A_ROWS + first + ranks[None, :])
    total = tl.zeros((tokens.shape[0], ranks.shape[0]), tl.float32)
    for split in tl.static_range(0, SPLITS, SPLITS_AT_ONCE):
        part = tl.load(places + split * A_ROWS * num_tokens, mask=mask, other=0.0)
        for at in tl.static_range(1, SPLITS_AT_ONCE):
            if split + at < SPLITS:
                part += tl.load(places + (split + at) * A_ROWS * num_tokens, mask=mask, other=0.0)
        total += part
    return total


@triton.jit
def fill_kernel(
    sums_ptr: tl.tensor,
    b_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    N: tl.constexpr,
    B_ROWS: tl.constexpr,
    RANK: tl.constexpr,
    A_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,
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
    """BLOCK_N outputs, all in one part or in none, of BLOCK_T tokens: program (outputs, tokens).

    Sums are loaded ahead of slots, so that no load waits for another but B.
    """
    first = tl.program_id(0) * BLOCK_N
    part, b_first = part_of(
        first, START_0, START_1, START_2, START_3, ROWS_0, ROWS_1, ROWS_2, ROWS_3
    )  # fmt: skip
    b_rows, columns = b_first + tl.arange(0, BLOCK_N), first + tl.arange(0, BLOCK_N)
    tokens, ranks = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R)
    is_token, of_part = tokens < num_tokens, tl.maximum(part, 0) * RANK
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    slots = tl.load(slots_ptr + tokens, mask=is_token & (part >= 0), other=-1)
    shrunk = added_up(sums_ptr, tokens, num_tokens, of_part, ranks, ranks < RANK, A_ROWS, SPLITS, SPLITS_AT_ONCE)
    out = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    slot = tl.min(tl.where(slots >= 0, slots, NO_SLOT))
    while slot < NO_SLOT:
        b = load_b(b_ptr, slot, b_rows, 0, True, B_ROWS, RANK, BLOCK_R)
        total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        total = tl.dot(shrunk.to(b.dtype), b, total, input_precision="ieee" if EXACT else "tf32")
        for r in tl.static_range(BLOCK_R, RANK, BLOCK_R):
            further = added_up(
                sums_ptr, tokens, num_tokens, of_part + r, ranks, r + ranks < RANK, A_ROWS, SPLITS, SPLITS_AT_ONCE
            )
            b = load_b(b_ptr, slot, b_rows, r, True, B_ROWS, RANK, BLOCK_R)
            total = tl.dot(further.to(b.dtype), b, total, input_precision="ieee" if EXACT else "tf32")
        out = tl.where((slots == slot)[:, None], total, out)
        slot = tl.min(tl.where(slots > slot, slots, NO_SLOT))
    places = out_ptr + (tokens.to(tl.int64)[:, None] * N + columns[None, :])
    tl.store(places, out.to(out_ptr.dtype.element_ty), mask=is_token[:, None])


def fill(
    sums: torch.Tensor,
    b: torch.Tensor,
    slots: torch.Tensor,
    starts: Sequence[int],
    rows: Sequence[int],
    out: torch.Tensor,
    is_launched: int | torch.SymInt,
) -> None:
    """Writes what adapters add into `out` [..., N]; not where `is_launched` is 0.

    Args:
        sums: [S, T, P * r] float32, by loop_kernel's blocks of few tokens.
    """
    outputs, num_tokens, rank = out.shape[-1], math.prod(out.shape[:-1]), b.shape[2]
    block_n = block_of_columns(outputs, starts, rows)
    wrap_triton(fill_kernel)[outputs // block_n, triton.cdiv(num_tokens, WRITTEN_TOKENS) * is_launched](
        sums,
        b,
        slots,
        out,
        num_tokens,
        N=outputs,
        B_ROWS=b.shape[1],
        RANK=rank,
        A_ROWS=sums.shape[2],
        SPLITS=sums.shape[0],
        SPLITS_AT_ONCE=SPLITS_OF_LONG,
        **parts_of(starts, rows),
        BLOCK_T=WRITTEN_TOKENS,
        BLOCK_N=block_n,
        BLOCK_R=padded_rank(rank),
        EXACT=out.dtype == torch.float32,
        EARLY=starts_early(),
        num_warps=4,
    )
