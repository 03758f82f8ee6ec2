"""The rows of each expert, in blocks: what grouped.py multiplies by one weight.

Triton by hand, as `torch.library.triton_op`, so that AOTInductor puts the compiled kernels into the piece's package.
Only the piece compiler imports this module: a loaded package needs neither Triton nor this op.

An atomic counter gives a row its place among its expert's rows, so it may differ from run to run. No number
does: a row's products do not depend on its neighbours. A small step takes one program; in a larger one programs count
side by side, one gives each expert its blocks, and programs enter the rows.

Shape legend: T tokens, k experts a token, E experts, R rows, N blocks of B rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.experts.shapes import ELSEWHERE, most_blocks, rows_of_unit

_ROWS_OF_PROGRAM = 1024  # of a large step
# Words from one expert's count to the next of a large step. The L2 takes one addition to a line at a time: with
# neighbouring counts 65,536 rows of 128 experts took 21 µs on an H100.
_COUNT_STRIDE = 32
_BLOCKS_AT_ONCE = 1024
_ELSEWHERE = tl.constexpr(ELSEWHERE)


@triton.jit
def _bins_of(ids: tl.tensor, is_real: tl.tensor, rows: tl.tensor, E: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The expert of each row, or E for one that no expert here has; and the row as `order` has it.

    Kernels load `ids` themselves. If a function loads a tensor and an address to write to follows from it, torch's
    analysis assumes that the tensor is written, and pieces would copy it.
    """
    is_chosen = is_real & (ids >= 0) & (ids < E)
    bins = tl.where(is_chosen, ids, E).to(tl.int32)
    return bins, tl.where(is_real & (is_chosen == 0) & (ids != _ELSEWHERE), -1 - rows, rows)


@triton.jit
def _enter_blocks(
    counts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    num_blocks: tl.tensor,
    E: tl.constexpr,
    B: tl.constexpr,
    BINS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
    STRIDE: tl.constexpr,
) -> None:
    """Writes where in `order` each bin's rows begin, how many a block has, and each block's expert and its rows."""
    bins = tl.arange(0, BINS)
    # Others' atomics counted: a level-one cache may hold what was there before.
    counts = tl.load(counts_ptr + bins * STRIDE, cache_modifier=".cg")
    needed = (counts + B - 1) // B
    ends = tl.cumsum(needed, 0)
    starts = ends - needed
    shares = ((counts + needed - 1) // tl.maximum(needed, 1) + UNIT - 1) // UNIT * UNIT
    tl.store(starts_ptr + bins, starts * B)
    tl.store(starts_ptr + BINS + bins, shares)
    for i in range(tl.max(needed, 0)):
        at = blocks_ptr + 2 * (starts + i)
        tl.store(at, tl.where(bins < E, bins, -1), mask=i < needed)
        tl.store(at + 1, tl.minimum(counts - i * shares, shares), mask=i < needed)
    for first in range(tl.max(ends, 0), num_blocks, BLOCKS_AT_ONCE):
        unused = first + tl.arange(0, BLOCKS_AT_ONCE)
        tl.store(blocks_ptr + 2 * unused, -1, mask=unused < num_blocks)
        tl.store(blocks_ptr + 2 * unused + 1, 0, mask=unused < num_blocks)


@triton.jit
def _enter_rows(
    starts_ptr: tl.tensor,
    order_ptr: tl.tensor,
    bins: tl.tensor,
    ranks: tl.tensor,
    entries: tl.tensor,
    is_row: tl.tensor,
    B: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    """Writes each row at its place."""
    starts = tl.load(starts_ptr + bins, mask=is_row, other=0, cache_modifier=".cg")
    share = tl.load(starts_ptr + BINS + bins, mask=is_row, other=1, cache_modifier=".cg")
    tl.store(order_ptr + starts + ranks // share * B + ranks % share, entries, mask=is_row)


@triton.jit
def _order_kernel(
    ids_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    order_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_blocks: tl.tensor,
    E: tl.constexpr,
    K: tl.constexpr,
    B: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program for all rows."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    tl.store(counts_ptr + tl.arange(0, BINS), 0)
    rows = tl.arange(0, ROWS)
    is_row = rows < num_rows
    is_real = is_row & (tl.load(slots_ptr + rows // K, mask=is_row, other=0) > 0)
    bins, entries = _bins_of(tl.load(ids_ptr + rows, mask=is_real, other=-1), is_real, rows, E)
    tl.debug_barrier()
    ranks = tl.atomic_add(counts_ptr + bins, 1, mask=rows < num_rows, sem="relaxed")
    tl.debug_barrier()
    _enter_blocks(counts_ptr, starts_ptr, blocks_ptr, num_blocks, E, B, BINS, UNIT, BLOCKS_AT_ONCE, 1)
    tl.debug_barrier()
    _enter_rows(starts_ptr, order_ptr, bins, ranks, entries, rows < num_rows, B, BINS)


@triton.jit
def _rank_kernel(
    ids_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    num_rows: tl.tensor,
    E: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    STRIDE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Gives each row its place among its expert's rows."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    is_real = is_row & (tl.load(slots_ptr + rows // K, mask=is_row, other=0) > 0)
    bins, _ = _bins_of(tl.load(ids_ptr + rows, mask=is_real, other=-1), is_real, rows, E)
    ranks = tl.atomic_add(counts_ptr + bins * STRIDE, 1, mask=rows < num_rows, sem="relaxed")
    tl.store(ranks_ptr + rows, ranks, mask=rows < num_rows)


@triton.jit
def _blocks_kernel(
    counts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    num_blocks: tl.tensor,
    E: tl.constexpr,
    B: tl.constexpr,
    BINS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
    STRIDE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Gives each expert its blocks. One program."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    _enter_blocks(counts_ptr, starts_ptr, blocks_ptr, num_blocks, E, B, BINS, UNIT, BLOCKS_AT_ONCE, STRIDE)


@triton.jit
def _enter_kernel(
    ids_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    order_ptr: tl.tensor,
    num_rows: tl.tensor,
    E: tl.constexpr,
    K: tl.constexpr,
    B: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Enters each row at its place."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    is_real = is_row & (tl.load(slots_ptr + rows // K, mask=is_row, other=0) > 0)
    bins, entries = _bins_of(tl.load(ids_ptr + rows, mask=is_real, other=-1), is_real, rows, E)
    ranks = tl.load(ranks_ptr + rows, mask=rows < num_rows, other=0)
    _enter_rows(starts_ptr, order_ptr, bins, ranks, entries, rows < num_rows, B, BINS)


@triton_op("mllm::order_experts", mutates_args={})
def order_experts(
    ids: torch.Tensor, slots: torch.Tensor, num_experts: int, block: int, most_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists the rows t·k + j by the expert ids[t, j] that they go to.

    Args:
        ids: [T, k] int64.
        slots: [T] int64, a token's slot of the KV cache: 0 is padding, whose rows go to no expert.
        block: B, rows of a block.
        most_rows: one program takes all rows, at most so many (`rows_at_once`); 0: several do.

    Returns:
        order [N·B] int32, rows by blocks; and blocks [N, 2] int32: the expert of each block, and how many of its places
        in `order` hold rows. Expert -1 has the rows of no expert: rows of padding and of ids that are ELSEWHERE, and,
        as -1 - row, rows whose id is not in [0, E).
    """
    ids, slots = ids.contiguous(), slots.contiguous()
    num_tokens, num_chosen = ids.shape
    num_rows = num_tokens * num_chosen
    num_blocks = most_blocks(num_rows, num_experts, block)
    order = torch.empty(num_blocks * block, dtype=torch.int32, device=ids.device)
    blocks = torch.empty((num_blocks, 2), dtype=torch.int32, device=ids.device)
    bins = triton.next_power_of_2(num_experts + 1)  # the last is of rows that no expert has
    starts = torch.empty((2, bins), dtype=torch.int32, device=ids.device)
    early = starts_early()
    of_rows = {"E": num_experts, "K": num_chosen, "EARLY": early}
    of_blocks = {"B": block, "BINS": bins, "UNIT": rows_of_unit(block), "BLOCKS_AT_ONCE": _BLOCKS_AT_ONCE}
    if most_rows:
        counts = torch.empty(bins, dtype=torch.int32, device=ids.device)
        rows = triton.next_power_of_2(most_rows)
        wrap_triton(_order_kernel)[(1,)](
            ids,
            slots,
            counts,
            starts,
            order,
            blocks,
            num_rows,
            num_blocks,
            ROWS=rows,
            num_warps=min(max(4, rows // 64), 32),
            **of_rows,
            **of_blocks,
        )
        return order, blocks
    counts = torch.zeros(bins * _COUNT_STRIDE, dtype=torch.int32, device=ids.device)
    ranks = torch.empty(num_rows, dtype=torch.int32, device=ids.device)
    programs = ((num_rows + _ROWS_OF_PROGRAM - 1) // _ROWS_OF_PROGRAM,)
    wrap_triton(_rank_kernel)[programs](
        ids, slots, counts, ranks, num_rows, ROWS=_ROWS_OF_PROGRAM, STRIDE=_COUNT_STRIDE, **of_rows
    )
    wrap_triton(_blocks_kernel)[(1,)](
        counts, starts, blocks, num_blocks, E=num_experts, STRIDE=_COUNT_STRIDE, EARLY=early, **of_blocks
    )
    wrap_triton(_enter_kernel)[programs](
        ids, slots, starts, ranks, order, num_rows, B=block, BINS=bins, ROWS=_ROWS_OF_PROGRAM, **of_rows
    )
    return order, blocks
