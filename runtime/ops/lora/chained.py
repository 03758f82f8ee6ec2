"""Kernels that add what adapters change and go on to the next linear's A, for few tokens: a launch for three.

Between two linears lie the second product of one's adapters, a residual or an activation, a norm, and the first
product of the next one's. A block has some columns of tokens of one adapter, as expand.py's, and so a sum over these
columns of the next product. The norm's factor is left to whom reads that, with sums of squares, as in
runtime/ops/stream_linear/streamed_ops.py.

Shape legend: as expand.py; C columns of a block, B = N / C blocks, R rows of the next A.
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
from mllm_compile.runtime.ops.lora.expand import factors_of, num_norm_sums, times_b
from mllm_compile.runtime.ops.lora.shapes import FEW_TOKENS, chained_columns, padded_rank
from mllm_compile.runtime.ops.lora.shrink import slots_of_block
from mllm_compile.runtime.ops.lora.stretches import load_b


@triton.jit
def _load_a(
    a_ptr: tl.tensor,
    slot: tl.tensor,
    columns: tl.tensor,
    first: tl.constexpr,
    N: tl.constexpr,
    NEXT_ROWS: tl.constexpr,
    BLOCK_A: tl.constexpr,
) -> tl.tensor:
    """[columns, BLOCK_A] of the next A of a slot: rows from `first` on; zeros for a token without an adapter."""
    rows = first + tl.arange(0, BLOCK_A)
    places = tl.maximum(slot, 0).to(tl.int64) * NEXT_ROWS * N + rows[None, :] * N + columns[:, None]
    return tl.load(a_ptr + places, mask=(rows < NEXT_ROWS)[None, :] & (slot >= 0), other=0.0)


@triton.jit
def _shrink(
    x: tl.tensor,
    a: tl.tensor,
    a_ptr: tl.tensor,
    slot: tl.tensor,
    tokens: tl.tensor,
    is_token: tl.tensor,
    columns: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    N: tl.constexpr,
    NEXT_ROWS: tl.constexpr,
    BLOCK_A: tl.constexpr,
    EXACT: tl.constexpr,
) -> None:
    """Stores the block's sums of the next product; `a` has its first rows."""
    for first in tl.static_range(0, NEXT_ROWS, BLOCK_A):
        if first > 0:
            a = _load_a(a_ptr, slot, columns, first, N, NEXT_ROWS, BLOCK_A)
        total = tl.dot(x, a, input_precision="ieee" if EXACT else "tf32")
        rows = first + tl.arange(0, BLOCK_A)
        of_block = (tl.program_id(0).to(tl.int64) * num_tokens + tokens[:, None]) * NEXT_ROWS + rows[None, :]
        tl.store(out_ptr + of_block, total, mask=is_token[:, None] & (rows < NEXT_ROWS)[None, :])


@triton.jit
def norm_kernel(
    y_ptr: tl.tensor,
    shrunk_ptr: tl.tensor,
    b_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    a_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scaled_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    next_ptr: tl.tensor,
    num_tokens: tl.tensor,
    N: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    NEXT_ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_A: tl.constexpr,
    EXACT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """BLOCK_N columns of BLOCK_T tokens that have a slot, also -1: program (columns, tokens and slot)."""
    slot = tl.program_id(1) % SLOTS - 1
    tokens = tl.program_id(1) // SLOTS * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token, is_used = slots_of_block(slots_ptr, num_tokens, slot, tokens)
    if (tl.program_id(1) > 0) & (is_used == 0):
        return
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    b = load_b(b_ptr, tl.maximum(slot, 0), columns, 0, slot >= 0, N, RANK, BLOCK_R)
    a = _load_a(a_ptr, slot, columns, 0, N, NEXT_ROWS, BLOCK_A)
    weight = tl.load(norm_ptr + columns).to(tl.float32)
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    places = tokens[:, None].to(tl.int64) * N + columns[None, :]
    y = tl.load(y_ptr + places, mask=is_token[:, None], other=0.0)
    residual = tl.load(residual_ptr + places, mask=is_token[:, None], other=0.0)
    added = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    if slot >= 0:
        added = times_b(
            shrunk_ptr, tokens, is_token, num_tokens, None, 0, b, b_ptr, slot, columns,
            N, RANK, RANK, SPLITS, BLOCK_R, EXACT,
        )  # fmt: skip
    y = (y.to(tl.float32) + added).to(y.dtype)
    out = (residual.to(tl.float32) + y.to(tl.float32)).to(y.dtype)
    tl.store(out_ptr + places, out, mask=is_token[:, None])
    values = out.to(tl.float32)
    scaled = (values * weight + values if PLUS_ONE else values * weight).to(y.dtype)
    tl.store(scaled_ptr + places, scaled, mask=is_token[:, None])
    sums = tokens.to(tl.int64) * (N // BLOCK_N) + tl.program_id(0)
    tl.store(squares_ptr + sums, tl.sum(values * values, 1), mask=is_token)
    if slot >= 0:
        _shrink(scaled, a, a_ptr, slot, tokens, is_token, columns, next_ptr, num_tokens, N, NEXT_ROWS, BLOCK_A, EXACT)


@triton.jit
def gated_kernel(
    y_ptr: tl.tensor,
    shrunk_ptr: tl.tensor,
    b_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    a_ptr: tl.tensor,
    out_ptr: tl.tensor,
    next_ptr: tl.tensor,
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
    NEXT_ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_A: tl.constexpr,
    EXACT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """BLOCK_N of the N columns, of gate and of up, likewise."""
    slot = tl.program_id(1) % SLOTS - 1
    tokens = tl.program_id(1) // SLOTS * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token, is_used = slots_of_block(slots_ptr, num_tokens, slot, tokens)
    if (tl.program_id(1) > 0) & (is_used == 0):
        return
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    up_rows = columns + HAS_GATE * N  # of B
    b_slot = tl.maximum(slot, 0)
    if HAS_GATE:
        b_gate = load_b(b_ptr, b_slot, columns, 0, slot >= 0, B_ROWS, RANK, BLOCK_R)
    if HAS_UP:
        b_up = load_b(b_ptr, b_slot, up_rows, 0, slot >= 0, B_ROWS, RANK, BLOCK_R)
    a = _load_a(a_ptr, slot, columns, 0, N, NEXT_ROWS, BLOCK_A)
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    rows = tokens[:, None].to(tl.int64)
    gate = tl.load(y_ptr + (rows * 2 * N + columns[None, :]), mask=is_token[:, None], other=0.0)
    up = tl.load(y_ptr + (rows * 2 * N + N + columns[None, :]), mask=is_token[:, None], other=0.0)
    of_gate = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    of_up = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
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
    gate = (gate.to(tl.float32) + of_gate).to(gate.dtype).to(tl.float32)
    up = (up.to(tl.float32) + of_up).to(up.dtype)
    out = (gate / (1.0 + tl.exp(-gate))).to(up.dtype) * up
    tl.store(out_ptr + (rows * N + columns[None, :]), out, mask=is_token[:, None])
    if slot >= 0:
        _shrink(out, a, a_ptr, slot, tokens, is_token, columns, next_ptr, num_tokens, N, NEXT_ROWS, BLOCK_A, EXACT)


def _shared(y: torch.Tensor, shrunk: torch.Tensor, b: torch.Tensor, next_a: torch.Tensor) -> dict[str, Any]:
    """The arguments that both kernels have."""
    return {
        "RANK": b.shape[2],
        "SPLITS": shrunk.shape[0],
        "NEXT_ROWS": next_a.shape[1],
        "SLOTS": b.shape[0] + 1,
        "BLOCK_T": FEW_TOKENS,
        "BLOCK_N": chained_columns(next_a.shape[2]),
        "BLOCK_R": padded_rank(b.shape[2]),
        "BLOCK_A": padded_rank(next_a.shape[1]),
        "EXACT": y.dtype == torch.float32,
        "EARLY": starts_early(),
        "num_warps": 8,
    }


def _grid(num_tokens: int, columns: int, shared: dict[str, Any]) -> tuple[int, int]:
    return columns // shared["BLOCK_N"], triton.cdiv(num_tokens, FEW_TOKENS) * shared["SLOTS"]


@triton_op("mllm::lora_expand_norm", mutates_args={})
def lora_expand_norm(
    y: torch.Tensor,
    shrunk: torch.Tensor,
    b: torch.Tensor,
    slots: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    plus_one: bool,
    next_a: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A sum with a residual, what a norm needs of it, and the next linear's products with A.

    Args:
        y, residual: [..., N] of T tokens; shrunk: [S, T, r]; b: [L, N, r]; slots: [T] int32, an input of the step.
        norm_weight: [N]; with `plus_one` 1 is added to it.
        next_a: [L, R, N].

    Returns:
        h = residual + y + B u and h * norm_weight, [..., N] in the dtype of y; sums of squares of h, [..., B] float32;
        sums of the next product without the norm's factor, [B, T, R] float32.
    """
    y, residual = y.contiguous(), residual.contiguous()
    outputs, num_tokens = y.shape[-1], math.prod(y.shape[:-1])
    shared = _shared(y, shrunk, b, next_a)
    num_blocks = outputs // shared["BLOCK_N"]
    out, scaled = torch.empty_like(y), torch.empty_like(y)
    squares = torch.empty((*y.shape[:-1], num_blocks), dtype=torch.float32, device=y.device)
    products = torch.empty((num_blocks, num_tokens, next_a.shape[1]), dtype=torch.float32, device=y.device)
    wrap_triton(norm_kernel)[_grid(num_tokens, outputs, shared)](
        y,
        shrunk,
        b,
        slots,
        residual,
        norm_weight,
        next_a,
        out,
        scaled,
        squares,
        products,
        num_tokens,
        N=outputs,
        PLUS_ONE=plus_one,
        **shared,
    )
    return out, scaled, squares, products


@triton_op("mllm::lora_expand_gated_chained", mutates_args={})
def lora_expand_gated_chained(
    y: torch.Tensor,
    shrunk: torch.Tensor,
    b: torch.Tensor,
    slots: torch.Tensor,
    starts: Sequence[int],
    rows: Sequence[int],
    squares: torch.Tensor | None,
    eps: float,
    width: int,
    next_a: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives what lora_expand_gated does, and the next linear's products with A [L, R, N / 2] of it.

    Returns:
        [..., N / 2] in the dtype of y; [B, T, R] float32.
    """
    y = y.contiguous()
    columns, num_tokens = y.shape[-1] // 2, math.prod(y.shape[:-1])
    shared = _shared(y, shrunk, b, next_a)
    out = torch.empty((*y.shape[:-1], columns), dtype=y.dtype, device=y.device)
    num_blocks = columns // shared["BLOCK_N"]
    products = torch.empty((num_blocks, num_tokens, next_a.shape[1]), dtype=torch.float32, device=y.device)
    wrap_triton(gated_kernel)[_grid(num_tokens, columns, shared)](
        y,
        shrunk,
        b,
        slots,
        y if squares is None else squares,
        next_a,
        out,
        products,
        num_tokens,
        EPS=eps,
        NORM_SUMS=num_norm_sums(squares),
        WIDTH=width,
        N=columns,
        B_ROWS=b.shape[1],
        A_ROWS=shrunk.shape[2],
        HAS_GATE=int(0 in starts),
        HAS_UP=int(columns in starts),
        **shared,
    )
    return out, products
