"""The kernels that multiply inputs with A of each token's adapter.

Triton by hand, as `torch.library.triton_op`, so that AOTInductor puts the compiled kernels into the piece's package.
Only the piece compiler imports this module: a loaded package needs neither Triton nor these ops.

Of few tokens a block has one adapter: there is a block for each slot, and most find none of their tokens with it. So
nothing is planned ahead, and A is read ahead of the wait, as no kernel writes it. With many slots a block goes through
those of its tokens, and so does one of thousands of tokens, whose neighbours mostly have one. Sums are made without
atomics, and so are the same every time. A token's numbers do not depend on other tokens.

Shape legend: T tokens, K inputs of a linear, P of its parts with adapters, r their rank, L slots, S sums.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.lora.shapes import (
    APART_TOKENS,
    FEW_TOKENS,
    INPUTS_OF_SPLIT,
    LONG_TOKENS,
    MANY_TOKENS,
    MOST_SLOTS,
    SPLITS_OF_LONG,
    num_splits,
    padded_rank,
)

NO_SLOT = tl.constexpr(1 << 30)  # above all
_SUMS_OF_BLOCK = 512


@triton.jit
def slots_of_block(
    slots_ptr: tl.tensor, num_tokens: tl.tensor, slot: tl.tensor, tokens: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """The tokens of a block that have a slot, as a mask, and whether there are any."""
    is_token = tl.load(slots_ptr + tokens, mask=tokens < num_tokens, other=-2) == slot
    return is_token, tl.max(is_token.to(tl.int32), 0) > 0


@triton.jit
def slot_kernel(
    x_ptr: tl.tensor,
    a_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXACT: tl.constexpr,
    EARLY: tl.constexpr,
    EARLY_SLOTS: tl.constexpr,
) -> None:
    """BLOCK_T tokens times BLOCK_R rows of a slot's A, over INPUTS of the K: program (sum, rows, tokens and slot).

    The first block waits also where it finds no work.
    """
    if EARLY and not EARLY_SLOTS:
        wait_for_prerequisites()
        start_dependents()
    slot = tl.program_id(2) % SLOTS
    tokens = tl.program_id(2) // SLOTS * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token, is_used = slots_of_block(slots_ptr, num_tokens, slot, tokens)
    if (tl.program_id(2) > 0) & (is_used == 0):
        return
    rows = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = rows < ROWS
    columns = tl.program_id(0) * INPUTS + tl.arange(0, BLOCK_K)
    a_places = a_ptr + slot.to(tl.int64) * ROWS * K + (rows[None, :] * K + columns[:, None])
    a = tl.load(a_places, mask=is_row[None, :] & (columns < K)[:, None], other=0.0)
    if EARLY and EARLY_SLOTS:
        wait_for_prerequisites()
        start_dependents()
    x_places = x_ptr + tokens[:, None].to(tl.int64) * K + columns[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    for k in tl.static_range(0, INPUTS, BLOCK_K):
        is_column = columns + k < K
        if k > 0:
            a = tl.load(a_places + k, mask=is_row[None, :] & is_column[:, None], other=0.0)
        x = tl.load(x_places + k, mask=is_token[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(x, a, total, input_precision="ieee" if EXACT else "tf32")
    places = (tl.program_id(0).to(tl.int64) * num_tokens + tokens[:, None]) * ROWS + rows[None, :]
    tl.store(out_ptr + places, total, mask=is_token[:, None] & is_row[None, :])


@triton.jit
def loop_kernel(
    x_ptr: tl.tensor,
    a_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    SLOTS: tl.constexpr,
    APART_TOKENS: tl.constexpr,
    LONG_TOKENS: tl.constexpr,
    SPLITS_OF_LONG: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXACT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """BLOCK_T tokens times BLOCK_R rows of A, over INPUTS of the K inputs: program (tokens, sum and slot; rows).

    A block goes through the slots of its tokens. Up to APART_TOKENS it has one of the SLOTS, as neighbours may have
    others. From LONG_TOKENS on blocks are enough for SPLITS_OF_LONG of the sums each, which it adds up.
    """
    is_long, are_apart = num_tokens >= LONG_TOKENS, num_tokens <= APART_TOKENS
    inputs = tl.where(is_long, SPLITS_OF_LONG * INPUTS, INPUTS)
    num_blocks, slots_apart = tl.cdiv(num_tokens, BLOCK_T), tl.where(are_apart, SLOTS, 1)
    if tl.program_id(0) >= num_blocks * tl.cdiv(K, inputs) * slots_apart:
        return
    first = (tl.program_id(0) % num_blocks).to(tl.int64) * BLOCK_T
    index, own_slot = tl.program_id(0) // num_blocks // slots_apart, tl.program_id(0) // num_blocks % slots_apart
    tokens, rows = tl.arange(0, BLOCK_T), tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_token, is_row = first + tokens < num_tokens, rows < ROWS
    start = index * inputs
    end = tl.minimum(start + inputs, K)
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    slots = tl.load(slots_ptr + first + tokens, mask=is_token, other=-1)
    if SLOTS > 1:
        slots = tl.where((are_apart == 0) | (slots == own_slot), slots, -1)
    x_places = x_ptr + first * K
    out = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    slot = tl.min(tl.where(slots >= 0, slots, NO_SLOT))
    while slot < NO_SLOT:
        of_slot = a_ptr + slot.to(tl.int64) * ROWS * K
        total = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
        part = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
        for k in range(start, end, BLOCK_K):
            columns = k + tl.arange(0, BLOCK_K)
            is_column = columns < K
            x_mask = is_token[:, None] & is_column[None, :]
            x = tl.load(x_places + (tokens[:, None] * K + columns[None, :]), mask=x_mask, other=0.0)
            a = tl.load(
                of_slot + (rows[None, :] * K + columns[:, None]), mask=is_column[:, None] & is_row[None, :], other=0.0
            )
            part = tl.dot(x, a, part, input_precision="ieee" if EXACT else "tf32")
            is_end = ((k + BLOCK_K) % INPUTS == 0) | (k + BLOCK_K >= end)
            total = tl.where(is_end, total + part, total)
            part = tl.where(is_end, 0.0, part)
        out = tl.where((slots == slot)[:, None], total, out)
        slot = tl.min(tl.where(slots > slot, slots, NO_SLOT))
    of_block = out_ptr + (index.to(tl.int64) * num_tokens + first) * ROWS
    tl.store(of_block + (tokens[:, None] * ROWS + rows[None, :]), out, mask=(slots >= 0)[:, None] & is_row[None, :])


@triton.jit
def sum_kernel(
    sums_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    LONG_TOKENS: tl.constexpr,
    SPLITS_OF_LONG: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """BLOCK numbers, which have SPLITS sums each, added up in loop_kernel's order; any bits without a slot."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    is_long = num_tokens >= LONG_TOKENS
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = places < num_tokens * ROWS
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(0, SPLITS, SPLITS_OF_LONG):
        of_split = tl.where(is_long, split // SPLITS_OF_LONG, split).to(tl.int64) * ROWS * num_tokens
        part = tl.load(sums_ptr + of_split + places, mask=is_there, other=0.0)
        for at in tl.static_range(1, SPLITS_OF_LONG):
            if split + at < SPLITS:
                further = tl.full((), (split + at) * ROWS, tl.int64) * num_tokens
                part += tl.load(sums_ptr + further + places, mask=is_there & (is_long == 0), other=0.0)
        total += part
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=is_there)


@triton_op("mllm::lora_shrink", mutates_args={})
def lora_shrink(x: torch.Tensor, a: torch.Tensor, slots: torch.Tensor, is_few: bool, early_slots: bool) -> torch.Tensor:
    """Products of x [..., K] of T tokens with A [L, P * r, K] of each token's slot [T] int32.

    Args:
        is_few: right for any number of tokens, fast up to 256.
        early_slots: slots are an input of the step, not made by a kernel of it after the embedding, so that kernels may
            read them ahead of their wait.

    Returns:
        [S, T, P * r] float32 of few tokens: sums over some of the inputs each. Else [1, T, P * r] in the dtype of x.
        Any bits where the slot is -1.
    """
    x = x.contiguous()
    rows, num_tokens, num_slots = a.shape[1], math.prod(x.shape[:-1]), a.shape[0]
    out = torch.empty((num_splits(x.shape[-1]), num_tokens, rows), dtype=torch.float32, device=x.device)
    if is_few and num_slots <= MOST_SLOTS:
        num_blocks, blocks_of_rows = triton.cdiv(num_tokens, FEW_TOKENS), triton.cdiv(rows, padded_rank(rows))
        wrap_triton(slot_kernel)[out.shape[0], blocks_of_rows, num_blocks * num_slots](
            x,
            a,
            slots,
            out,
            num_tokens,
            SLOTS=num_slots,
            BLOCK_K=256,
            EARLY_SLOTS=early_slots,
            **_shared(x, rows, FEW_TOKENS),
        )
        return out
    by_loops(x, a, slots, out, is_few)
    return out if is_few else summed(out, x.dtype)


def by_loops(
    x: torch.Tensor,
    a: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    is_few: bool,
    is_launched: int | torch.SymInt = 1,
) -> None:
    """Writes the sums of lora_shrink into `out` [S, T, P * r] by blocks that go through slots; not where it is 0."""
    inputs, rows, num_tokens = x.shape[-1], a.shape[1], math.prod(x.shape[:-1])
    splits, num_slots = num_splits(inputs), a.shape[0]
    block_t = FEW_TOKENS if is_few else MANY_TOKENS
    num_blocks, blocks_of_rows = triton.cdiv(num_tokens, block_t), triton.cdiv(rows, padded_rank(rows))
    shared = _shared(x, rows, block_t) | {"BLOCK_K": 64 if x.dtype == torch.float32 else 128, "num_stages": 3}
    slots_apart = num_slots if num_slots <= MOST_SLOTS and not is_few else 1
    # The grid is a multiple of the tokens and a number besides: what shorter steps have more blocks for each of them.
    sums = splits if is_few else triton.cdiv(splits, SPLITS_OF_LONG)
    further = APART_TOKENS * (splits * slots_apart - sums), LONG_TOKENS * (splits - sums)
    grid = (num_blocks * sums + triton.cdiv(max(further), block_t)) * is_launched, blocks_of_rows
    wrap_triton(loop_kernel)[grid](
        x, a, slots, out, num_tokens, SLOTS=slots_apart, APART_TOKENS=APART_TOKENS, **_long(is_few), **shared
    )


def summed(sums: torch.Tensor, dtype: torch.dtype, is_launched: int | torch.SymInt = 1) -> torch.Tensor:
    """[1, T, P * r]: what by_loops has left of many tokens, added up; any bits where it is not launched."""
    splits, num_tokens, rows = sums.shape
    out = torch.empty((1, num_tokens, rows), dtype=dtype, device=sums.device)
    grid = (triton.cdiv(num_tokens * rows, _SUMS_OF_BLOCK) * is_launched,)
    of_sums = {"ROWS": rows, "SPLITS": splits, "BLOCK": _SUMS_OF_BLOCK, "EARLY": starts_early()}
    wrap_triton(sum_kernel)[grid](sums, out, num_tokens, **of_sums, **_long(is_few=False), num_warps=4)
    return out


def _long(is_few: bool) -> dict[str, int]:
    return {"LONG_TOKENS": NO_SLOT.value if is_few else LONG_TOKENS, "SPLITS_OF_LONG": SPLITS_OF_LONG}


def _shared(x: torch.Tensor, rows: int, block_t: int) -> dict[str, Any]:
    """The arguments that both kernels have, of blocks of so many tokens."""
    return {
        "K": x.shape[-1],
        "ROWS": rows,
        "INPUTS": INPUTS_OF_SPLIT,
        "BLOCK_T": block_t,
        "BLOCK_R": padded_rank(rows),
        "EXACT": x.dtype == torch.float32,
        "EARLY": starts_early(),
        "num_warps": 4,
    }
