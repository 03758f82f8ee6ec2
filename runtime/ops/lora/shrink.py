"""The kernels that multiply inputs with A of each token's adapter.

Triton by hand, as `torch.library.triton_op`, so that AOTInductor puts the compiled kernels into the piece's package.
Only the piece compiler imports this module: a loaded package needs neither Triton nor these ops.

Of few tokens a block has one adapter: there is a block for each slot, and most find none of their tokens with it. So
nothing is planned ahead, and A is read ahead of the wait, as no kernel writes it. With many slots a block goes through
those of its tokens, and so does one of many tokens, whose neighbours mostly have one. Sums are made without
atomics, and so are the same every time. A token's numbers do not depend on other tokens.

Shape legend: T tokens, K inputs of a linear, P of its parts with adapters, r their rank, L slots, S sums.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.lora.shapes import (
    FEW_TOKENS,
    HALF_TOKENS,
    INPUTS_OF_SPLIT,
    LEAST_SHARED_BYTES,
    MANY_TOKENS,
    MOST_SLOTS,
    QUARTER_TOKENS,
    num_splits,
    padded_rank,
    read_stages_of,
)
from mllm_compile.runtime.ops.shared_memory import most_shared_bytes

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
    SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
    QUARTER_TOKENS: tl.constexpr,
    HALF_TOKENS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXACT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Tokens of a block times BLOCK_R rows of A, over INPUTS of the K inputs, or with one of SPLITS over all: program
    (tokens, sum and slot; rows).

    A block goes through the slots of its tokens; where SLOTS is not 1, it has one of them, as neighbours may have
    others. Inputs are added up to sums of INPUTS, and these in their order. Products are of BLOCK_T tokens also where a
    block has a part of them, so that a token's bits are the same.
    """
    length = tl.where(num_tokens < HALF_TOKENS, BLOCK_T // 2, BLOCK_T)
    length = tl.where(num_tokens < QUARTER_TOKENS, BLOCK_T // 4, length)
    num_blocks = tl.cdiv(num_tokens, length)
    if tl.program_id(0) >= num_blocks * SPLITS * SLOTS:
        return
    first = (tl.program_id(0) % num_blocks).to(tl.int64) * length
    index, own_slot = tl.program_id(0) // num_blocks // SLOTS, tl.program_id(0) // num_blocks % SLOTS
    tokens, rows = tl.arange(0, BLOCK_T), tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_token, is_row = (first + tokens < num_tokens) & (tokens < length), rows < ROWS
    start = index * INPUTS
    end = K if SPLITS == 1 else tl.minimum(start + INPUTS, K)
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    slots = tl.load(slots_ptr + first + tokens, mask=is_token, other=-1)
    if SLOTS > 1:
        slots = tl.where(slots == own_slot, slots, -1)
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
    is_changed = (slots >= 0)[:, None] & is_row[None, :]
    tl.store(of_block + (tokens[:, None] * ROWS + rows[None, :]), out.to(out_ptr.dtype.element_ty), mask=is_changed)


@triton.jit
def sum_kernel(
    sums_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """BLOCK numbers, which have SPLITS sums each, added up in loop_kernel's order; any bits without a slot."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = places < num_tokens * ROWS
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(0, SPLITS):
        further = tl.full((), split * ROWS, tl.int64) * num_tokens
        total += tl.load(sums_ptr + further + places, mask=is_there, other=0.0)
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=is_there)


@triton_op("mllm::lora_shrink", mutates_args={})
def lora_shrink(x: torch.Tensor, a: torch.Tensor, slots: torch.Tensor, form: str, early_slots: bool) -> torch.Tensor:
    """Products of x [..., K] of T tokens with A [L, P * r, K] of each token's slot [T] int32.

    Args:
        form: shapes.py's Form.
        early_slots: slots are an input of the step, not made by a kernel of it after the embedding, so that kernels may
            read them ahead of their wait.

    Returns:
        [1, T, P * r] in the dtype of x of many tokens. Else [S, T, P * r] float32: sums over some of the inputs each.
        Any bits where the slot is -1.
    """
    x = x.contiguous()
    inputs, rows, num_tokens = x.shape[-1], a.shape[1], math.prod(x.shape[:-1])
    splits, num_slots = 1 if form == "many" else num_splits(inputs), a.shape[0]
    block_t = FEW_TOKENS if form == "few" else MANY_TOKENS
    num_blocks, blocks_of_rows = triton.cdiv(num_tokens, block_t), triton.cdiv(rows, padded_rank(rows))
    kind = x.dtype if form == "many" else torch.float32
    out = torch.empty((splits, num_tokens, rows), dtype=kind, device=x.device)
    shared = {
        "K": x.shape[-1],
        "ROWS": rows,
        "INPUTS": INPUTS_OF_SPLIT,
        "BLOCK_T": block_t,
        "BLOCK_R": padded_rank(rows),
        "EXACT": x.dtype == torch.float32,
        "EARLY": starts_early(),
        "num_warps": 4,
    }
    if form == "few" and num_slots <= MOST_SLOTS:
        grid = splits, blocks_of_rows, num_blocks * num_slots
        wrap_triton(slot_kernel)[grid](
            x, a, slots, out, num_tokens, SLOTS=num_slots, BLOCK_K=256, EARLY_SLOTS=early_slots, **shared
        )
        return out
    block_k = 64 if x.dtype == torch.float32 else 128
    shared_bytes = most_shared_bytes() if torch.cuda.is_available() else LEAST_SHARED_BYTES
    block_bytes = block_k * (block_t + shared["BLOCK_R"]) * x.element_size()
    shared |= {"BLOCK_K": block_k, "num_stages": read_stages_of(form, block_bytes, shared_bytes)}
    slots_apart = num_slots if form == "some" and num_slots <= MOST_SLOTS else 1
    quarter, half = (QUARTER_TOKENS, HALF_TOKENS) if form == "many" else (0, 0)
    # The grid is a multiple of the tokens and a number besides: what shorter steps have more blocks for each of them.
    further = triton.cdiv(max(3 * quarter, half), block_t)
    wrap_triton(loop_kernel)[(num_blocks * splits * slots_apart + further, blocks_of_rows)](
        x,
        a,
        slots,
        out,
        num_tokens,
        SPLITS=splits,
        SLOTS=slots_apart,
        QUARTER_TOKENS=quarter,
        HALF_TOKENS=half,
        **shared,
    )
    return out


@triton_op("mllm::lora_sum", mutates_args={})
def lora_sum(shrunk: torch.Tensor) -> torch.Tensor:
    """Adds up what lora_shrink gives of some tokens, [S, T, P * r], to what it gives of many.

    Returns:
        [1, T, P * r] bfloat16.
    """
    splits, num_tokens, rows = shrunk.shape
    summed = torch.empty((1, num_tokens, rows), dtype=torch.bfloat16, device=shrunk.device)
    grid = (triton.cdiv(num_tokens * rows, _SUMS_OF_BLOCK),)
    of_sums = {"ROWS": rows, "SPLITS": splits, "BLOCK": _SUMS_OF_BLOCK, "EARLY": starts_early()}
    wrap_triton(sum_kernel)[grid](shrunk, summed, num_tokens, **of_sums, num_warps=4)
    return summed
