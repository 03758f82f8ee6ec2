"""The kernels that add to outputs what their tokens' adapters change: B times what shrink.py's leave. One form ends
with the activation of a feed-forward.

Blocks have tokens and adapters as shrink.py's do, and read B ahead of their wait likewise.

Shape legend: T tokens, N outputs of a linear, P of its parts with adapters, r their rank, L slots, S sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.lora.shapes import (
    FEW_TOKENS,
    MOST_SLOTS,
    WRITTEN_TOKENS,
    block_of_columns,
    padded_rank,
)
from mllm_compile.runtime.ops.lora.shrink import NO_SLOT, slots_of_block
from mllm_compile.runtime.ops.lora.stretches import load_b, part_of, parts_of, written

_GATED_COLUMNS = 64  # of a block, of gate and of up each


@triton.jit
def factors_of(
    squares_ptr: tl.tensor,
    tokens: tl.tensor,
    is_token: tl.tensor,
    EPS: tl.constexpr,
    NORM_SUMS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """[tokens] float32: the factors of their norm, of NORM_SUMS sums of squares each; ones if that is 0."""
    factors = tl.full(tokens.shape, 1.0, tl.float32)
    if NORM_SUMS > 0:
        SUMS: tl.constexpr = triton.next_power_of_2(NORM_SUMS)
        sums = tl.arange(0, SUMS)
        mask = is_token[:, None] & (sums < NORM_SUMS)[None, :]
        squares = tl.load(squares_ptr + (tokens[:, None] * NORM_SUMS + sums[None, :]), mask=mask, other=0.0)
        factors = tl.rsqrt(tl.sum(squares, 1) / WIDTH + EPS)
    return factors


def num_norm_sums(squares: torch.Tensor | None) -> int:
    """Sums of squares that a token has; 0: there is no norm."""
    return 0 if squares is None else squares.shape[-1]


@triton.jit
def times_b(
    shrunk_ptr: tl.tensor,
    tokens: tl.tensor,
    is_token: tl.tensor,
    num_tokens: tl.tensor,
    factors: tl.tensor | None,
    part: tl.tensor,
    b: tl.tensor,
    b_ptr: tl.tensor,
    slot: tl.tensor,
    b_rows: tl.tensor,
    B_ROWS: tl.constexpr,
    RANK: tl.constexpr,
    A_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    EXACT: tl.constexpr,
) -> tl.tensor:
    """[tokens, BLOCK_N] float32: rows of a slot's B times the sums that the tokens have of a part's A.

    `tokens` are counted from `shrunk_ptr`. `factors` [tokens] are of the norm ahead. `b` has the first ranks of B.
    """
    total = tl.zeros((tokens.shape[0], b.shape[1]), tl.float32)
    for r in tl.static_range(0, RANK, BLOCK_R):
        ranks = r + tl.arange(0, BLOCK_R)
        mask = is_token[:, None] & (ranks < RANK)[None, :]
        places = shrunk_ptr + (tokens[:, None] * A_ROWS + part * RANK + ranks[None, :])
        shrunk = tl.load(places, mask=mask, other=0.0)
        for split in tl.static_range(1, SPLITS):
            further = tl.full((), split * A_ROWS, tl.int64) * num_tokens
            shrunk += tl.load(places + further, mask=mask, other=0.0)
        if factors is not None:
            shrunk *= factors[:, None]
        if r > 0:
            b = load_b(b_ptr, slot, b_rows, r, True, B_ROWS, RANK, BLOCK_R)
        total = tl.dot(shrunk.to(b.dtype), b, total, input_precision="ieee" if EXACT else "tf32")
    return total


@triton.jit
def expand_kernel(
    y_ptr: tl.tensor,
    shrunk_ptr: tl.tensor,
    b_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    EPS: tl.constexpr,
    NORM_SUMS: tl.constexpr,
    WIDTH: tl.constexpr,
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
    SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    EXACT: tl.constexpr,
    EARLY: tl.constexpr,
    EARLY_SLOTS: tl.constexpr,
) -> None:
    """BLOCK_N outputs, all in one part or in none, of BLOCK_T tokens: program (outputs, tokens).

    With SLOTS, -1 among them, program (outputs, tokens and slot): of those tokens alone that have the slot.
    """
    first = tl.program_id(0) * BLOCK_N
    part, b_first = part_of(
        first, START_0, START_1, START_2, START_3, ROWS_0, ROWS_1, ROWS_2, ROWS_3
    )  # fmt: skip
    b_rows = b_first + tl.arange(0, BLOCK_N)
    columns = first + tl.arange(0, BLOCK_N)
    if SLOTS > 0:
        if EARLY and not EARLY_SLOTS:
            wait_for_prerequisites()
            start_dependents()
        slot = tl.program_id(1) % SLOTS - 1
        tokens = tl.program_id(1) // SLOTS * BLOCK_T + tl.arange(0, BLOCK_T)
        is_token, is_used = slots_of_block(slots_ptr, num_tokens, slot, tokens)
        if (tl.program_id(1) > 0) & (is_used == 0):
            return
        is_changed = (slot >= 0) & (part >= 0)
        b = load_b(b_ptr, tl.maximum(slot, 0), b_rows, 0, is_changed, B_ROWS, RANK, BLOCK_R)
        if EARLY and EARLY_SLOTS:
            wait_for_prerequisites()
            start_dependents()
        places = tokens[:, None].to(tl.int64) * N + columns[None, :]
        of_y, of_out = y_ptr, out_ptr
        y = tl.load(of_y + places, mask=is_token[:, None], other=0.0)
        added = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        if is_changed:
            factors = factors_of(squares_ptr, tokens, is_token, EPS, NORM_SUMS, WIDTH)
            added = times_b(
                shrunk_ptr, tokens, is_token, num_tokens, factors, part, b, b_ptr, slot, b_rows,
                B_ROWS, RANK, A_ROWS, SPLITS, BLOCK_R, EXACT,
            )  # fmt: skip
    else:
        block = tl.program_id(1).to(tl.int64) * BLOCK_T
        tokens = tl.arange(0, BLOCK_T)
        is_token = block + tokens < num_tokens
        of_block = shrunk_ptr + block * A_ROWS
        if EARLY:
            wait_for_prerequisites()
            start_dependents()
        places = tokens[:, None] * N + columns[None, :]
        of_y, of_out = y_ptr + block * N, out_ptr + block * N
        y = tl.load(of_y + places, mask=is_token[:, None], other=0.0)
        slots = tl.load(slots_ptr + block + tokens, mask=is_token, other=-1)
        added = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        slot = tl.min(tl.where((slots >= 0) & (part >= 0), slots, NO_SLOT))
        while slot < NO_SLOT:
            b = load_b(b_ptr, slot, b_rows, 0, True, B_ROWS, RANK, BLOCK_R)
            total = times_b(
                of_block, tokens, slots == slot, num_tokens, None, part, b, b_ptr, slot, b_rows,
                B_ROWS, RANK, A_ROWS, SPLITS, BLOCK_R, EXACT,
            )  # fmt: skip
            added = tl.where((slots == slot)[:, None], total, added)
            slot = tl.min(tl.where(slots > slot, slots, NO_SLOT))
    out = y.to(tl.float32) + added
    tl.store(of_out + places, out.to(y.dtype), mask=is_token[:, None])


@triton.jit
def gated_kernel(
    y_ptr: tl.tensor,
    shrunk_ptr: tl.tensor,
    b_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    EPS: tl.constexpr,
    NORM_SUMS: tl.constexpr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    B_ROWS: tl.constexpr,
    RANK: tl.constexpr,
    A_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_UP: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    EXACT: tl.constexpr,
    EARLY: tl.constexpr,
    EARLY_SLOTS: tl.constexpr,
) -> None:
    """BLOCK_N of the N columns of gate and of up, as expand_kernel; roundings are where the two kernels have them."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    up_rows = columns + HAS_GATE * N  # of B
    of_gate = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    of_up = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    if SLOTS > 0:
        if EARLY and not EARLY_SLOTS:
            wait_for_prerequisites()
            start_dependents()
        slot = tl.program_id(1) % SLOTS - 1
        tokens = tl.program_id(1) // SLOTS * BLOCK_T + tl.arange(0, BLOCK_T)
        is_token, is_used = slots_of_block(slots_ptr, num_tokens, slot, tokens)
        if (tl.program_id(1) > 0) & (is_used == 0):
            return
        b_slot = tl.maximum(slot, 0)
        if HAS_GATE:
            b_gate = load_b(b_ptr, b_slot, columns, 0, slot >= 0, B_ROWS, RANK, BLOCK_R)
        if HAS_UP:
            b_up = load_b(b_ptr, b_slot, up_rows, 0, slot >= 0, B_ROWS, RANK, BLOCK_R)
        if EARLY and EARLY_SLOTS:
            wait_for_prerequisites()
            start_dependents()
        rows, of_y, of_out = tokens[:, None].to(tl.int64), y_ptr, out_ptr
        gate = tl.load(of_y + (rows * 2 * N + columns[None, :]), mask=is_token[:, None], other=0.0)
        up = tl.load(of_y + (rows * 2 * N + N + columns[None, :]), mask=is_token[:, None], other=0.0)
        if slot >= 0:
            factors = factors_of(squares_ptr, tokens, is_token, EPS, NORM_SUMS, WIDTH)
            if HAS_GATE:
                of_gate = times_b(
                    shrunk_ptr, tokens, is_token, num_tokens, factors, 0, b_gate, b_ptr, slot, columns,  # type: ignore[possibly-undefined]  # HAS_GATE gave it
                    B_ROWS, RANK, A_ROWS, SPLITS, BLOCK_R, EXACT,
                )  # fmt: skip
            if HAS_UP:
                of_up = times_b(
                    shrunk_ptr, tokens, is_token, num_tokens, factors, HAS_GATE, b_up, b_ptr, slot, up_rows,  # type: ignore[possibly-undefined]  # HAS_UP gave it
                    B_ROWS, RANK, A_ROWS, SPLITS, BLOCK_R, EXACT,
                )  # fmt: skip
    else:
        block = tl.program_id(1).to(tl.int64) * BLOCK_T
        tokens = tl.arange(0, BLOCK_T)
        is_token = block + tokens < num_tokens
        of_block = shrunk_ptr + block * A_ROWS
        if EARLY:
            wait_for_prerequisites()
            start_dependents()
        rows, of_y, of_out = tokens[:, None], y_ptr + block * 2 * N, out_ptr + block * N
        gate = tl.load(of_y + (rows * 2 * N + columns[None, :]), mask=is_token[:, None], other=0.0)
        up = tl.load(of_y + (rows * 2 * N + N + columns[None, :]), mask=is_token[:, None], other=0.0)
        slots = tl.load(slots_ptr + block + tokens, mask=is_token, other=-1)
        slot = tl.min(tl.where(slots >= 0, slots, NO_SLOT))
        while slot < NO_SLOT:
            if HAS_GATE:
                b = load_b(b_ptr, slot, columns, 0, True, B_ROWS, RANK, BLOCK_R)
                total = times_b(
                    of_block, tokens, slots == slot, num_tokens, None, 0, b, b_ptr, slot, columns,
                    B_ROWS, RANK, A_ROWS, SPLITS, BLOCK_R, EXACT,
                )  # fmt: skip
                of_gate = tl.where((slots == slot)[:, None], total, of_gate)
            if HAS_UP:
                b = load_b(b_ptr, slot, up_rows, 0, True, B_ROWS, RANK, BLOCK_R)
                total = times_b(
                    of_block, tokens, slots == slot, num_tokens, None, HAS_GATE, b, b_ptr, slot, up_rows,
                    B_ROWS, RANK, A_ROWS, SPLITS, BLOCK_R, EXACT,
                )  # fmt: skip
                of_up = tl.where((slots == slot)[:, None], total, of_up)
            slot = tl.min(tl.where(slots > slot, slots, NO_SLOT))
    gate = (gate.to(tl.float32) + of_gate).to(gate.dtype).to(tl.float32)
    up = (up.to(tl.float32) + of_up).to(up.dtype)
    silu = gate / (1.0 + tl.exp(-gate))
    tl.store(of_out + (rows * N + columns[None, :]), silu.to(up.dtype) * up, mask=is_token[:, None])


def _shared(y: torch.Tensor, shrunk: torch.Tensor, b: torch.Tensor, is_few: bool) -> tuple[int, dict[str, Any]]:
    """The grid's size over tokens, and the arguments that both kernels have."""
    num_tokens = math.prod(y.shape[:-1])
    slots = b.shape[0] + 1 if is_few and b.shape[0] <= MOST_SLOTS else 0
    block_t = FEW_TOKENS if is_few else WRITTEN_TOKENS
    return triton.cdiv(num_tokens, block_t) * max(slots, 1), {
        "B_ROWS": b.shape[1],
        "RANK": b.shape[2],
        "A_ROWS": shrunk.shape[2],
        "SPLITS": shrunk.shape[0],
        "SLOTS": slots,
        "BLOCK_T": block_t,
        "BLOCK_R": padded_rank(b.shape[2]),
        "EXACT": y.dtype == torch.float32,
        "EARLY": starts_early(),
        "num_warps": 4,
    }


@triton_op("mllm::lora_expand", mutates_args={})
def lora_expand(
    y: torch.Tensor,
    shrunk: torch.Tensor,
    b: torch.Tensor,
    slots: torch.Tensor,
    starts: Sequence[int],
    rows: Sequence[int],
    is_few: bool,
    early_slots: bool,
    squares: torch.Tensor | None = None,
    eps: float = 0.0,
    width: int = 0,
) -> torch.Tensor:
    """y + B of each token's slot times what lora_shrink gave of it.

    Args:
        y: [..., N] of T tokens; shrunk: [S, T, P * r] of any type, S is 1 of many tokens; b: [L, sum of rows, r];
            slots: [T] int32.
        starts, rows: [P] the outputs of each part; takes_lora says which are taken.
        is_few, early_slots: as lora_shrink had them.
        squares: [..., B] float32, of few tokens: sums of squares of the inputs of a norm of this width, whose factor
            `shrunk` lacks.

    Returns:
        [..., N] in the dtype of y.
    """
    y = y.contiguous()
    if not is_few:
        return written(y, shrunk, b, slots, starts, rows, torch.empty_like(y))
    outputs, num_tokens = y.shape[-1], math.prod(y.shape[:-1])
    block_n, out = block_of_columns(outputs, starts, rows), torch.empty_like(y)
    blocks, shared = _shared(y, shrunk, b, is_few)
    shared |= {"N": outputs, "BLOCK_N": block_n, **parts_of(starts, rows)}
    wrap_triton(expand_kernel)[(outputs // block_n, blocks)](
        y,
        shrunk,
        b,
        slots,
        y if squares is None else squares,
        out,
        num_tokens,
        EPS=eps,
        NORM_SUMS=num_norm_sums(squares),
        WIDTH=width,
        EARLY_SLOTS=early_slots,
        **shared,
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
    is_few: bool,
    early_slots: bool,
    squares: torch.Tensor | None = None,
    eps: float = 0.0,
    width: int = 0,
) -> torch.Tensor:
    """silu(gate) * up of what lora_expand gives, whose halves they are, gate first.

    Args:
        y, shrunk, b, slots, is_few, early_slots, squares: as lora_expand's.
        starts, rows: of one half or of both; takes_gated says which are taken.

    Returns:
        [..., N / 2] in the dtype of y.
    """
    y = y.contiguous()
    columns = y.shape[-1] // 2
    block_n = min(block_of_columns(columns, [0], [columns]), _GATED_COLUMNS)
    blocks, shared = _shared(y, shrunk, b, is_few)
    out = torch.empty((*y.shape[:-1], columns), dtype=y.dtype, device=y.device)
    wrap_triton(gated_kernel)[(columns // block_n, blocks)](
        y,
        shrunk,
        b,
        slots,
        y if squares is None else squares,
        out,
        math.prod(y.shape[:-1]),
        EPS=eps,
        NORM_SUMS=num_norm_sums(squares),
        WIDTH=width,
        N=columns,
        HAS_GATE=int(0 in starts),
        HAS_UP=int(columns in starts),
        BLOCK_N=block_n,
        EARLY_SLOTS=early_slots,
        **shared,
    )
    return out
