"""The kernel that adds to outputs of many tokens what their adapters change: B times the products with A. For a product
that adds to it (linear.py) it writes that alone.

It is bound by reading and writing outputs. So a block takes a stretch of tokens, whose next ones are on their way while
some are computed. Neighbours mostly have one adapter, whose B is read once: in prompts, and in decodes, which are
sorted. A stretch with several is gone through for each, so that a token's product is made alike in any company.

Shape legend: T tokens, N outputs of a linear, P of its parts with adapters, r their rank, L slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.lora.shapes import (
    MOST_PARTS,
    SHORT_TOKENS,
    STRETCH_TOKENS,
    WRITTEN_TOKENS,
    block_of_columns,
    padded_rank,
    stages_of,
)
from mllm_compile.runtime.ops.lora.shrink import NO_SLOT
from mllm_compile.runtime.ops.shared_memory import most_shared_bytes

_LEAST_SHARED_BYTES = 99 << 10  # of the GPUs that there are kernels for


@triton.jit
def part_of(
    first: tl.tensor,
    START_0: tl.constexpr,
    START_1: tl.constexpr,
    START_2: tl.constexpr,
    START_3: tl.constexpr,
    ROWS_0: tl.constexpr,
    ROWS_1: tl.constexpr,
    ROWS_2: tl.constexpr,
    ROWS_3: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The part with adapters that an output is in, -1 if in none, and its row of B."""
    in_0 = (first >= START_0) & (first < START_0 + ROWS_0)
    in_1 = (first >= START_1) & (first < START_1 + ROWS_1)
    in_2 = (first >= START_2) & (first < START_2 + ROWS_2)
    in_3 = (first >= START_3) & (first < START_3 + ROWS_3)
    part = tl.where(in_0, 0, tl.where(in_1, 1, tl.where(in_2, 2, tl.where(in_3, 3, -1))))
    b_first = tl.where(in_1, first - START_1 + ROWS_0, first - START_0)
    b_first = tl.where(in_2, first - START_2 + ROWS_0 + ROWS_1, b_first)
    b_first = tl.where(in_3, first - START_3 + ROWS_0 + ROWS_1 + ROWS_2, b_first)
    return part, b_first


@triton.jit
def load_b(
    b_ptr: tl.tensor,
    slot: tl.tensor,
    b_rows: tl.tensor,
    first: tl.constexpr,
    is_there: tl.tensor,
    B_ROWS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> tl.tensor:
    """[BLOCK_R, BLOCK_N] of a slot's B: from rank `first` on; zeros where it is not there."""
    ranks = first + tl.arange(0, BLOCK_R)
    places = b_ptr + slot.to(tl.int64) * B_ROWS * RANK + b_rows[None, :] * RANK + ranks[:, None]
    return tl.load(places, mask=(ranks < RANK)[:, None] & is_there, other=0.0)


@triton.jit
def product_of(
    shrunk_ptr: tl.tensor,
    tokens: tl.tensor,
    is_token: tl.tensor,
    has_slot: tl.tensor,
    b: tl.tensor,
    b_ptr: tl.tensor,
    slot: tl.tensor,
    b_rows: tl.tensor,
    is_there: tl.tensor,
    B_ROWS: tl.constexpr,
    RANK: tl.constexpr,
    A_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    EXACT: tl.constexpr,
) -> tl.tensor:
    """[tokens, BLOCK_N] float32: B of a slot times what `shrunk_ptr` has of a part's A; zeros of tokens of other slots.

    All tokens' products are loaded, so that no load waits for slots; of those without an adapter they are any bits.
    Their zeros are put behind tl.dot: if + y followed it at once, Triton (CombineDotAddPattern in Combine.cpp) would
    let the product start from y. The kernel that ends with the activation adds in this order.
    """
    total = tl.zeros((tokens.shape[0], b.shape[1]), tl.float32)
    for r in tl.static_range(0, RANK, BLOCK_R):
        ranks = r + tl.arange(0, BLOCK_R)
        mask = is_token[:, None] & (ranks < RANK)[None, :]
        shrunk = tl.load(shrunk_ptr + (tokens[:, None] * A_ROWS + ranks[None, :]), mask=mask, other=0.0)
        if r > 0:
            b = load_b(b_ptr, slot, b_rows, r, is_there, B_ROWS, RANK, BLOCK_R)
        total = tl.dot(shrunk.to(b.dtype), b, total, input_precision="ieee" if EXACT else "tf32")
    return tl.where(has_slot[:, None], total, 0.0)


@triton.jit
def stretch_kernel(
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
    START_0: tl.constexpr,
    START_1: tl.constexpr,
    START_2: tl.constexpr,
    START_3: tl.constexpr,
    ROWS_0: tl.constexpr,
    ROWS_1: tl.constexpr,
    ROWS_2: tl.constexpr,
    ROWS_3: tl.constexpr,
    STRETCH: tl.constexpr,
    SHORT_TOKENS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    ADDS: tl.constexpr,
    EXACT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """BLOCK_N outputs, all in one part or in none, of STRETCH tokens, BLOCK_T at a time: program (outputs, stretch).

    Of fewer than SHORT_TOKENS a stretch is BLOCK_T tokens, as blocks would be few. A block goes through it once for
    each slot of its tokens, the first time for those without one too. Without ADDS nothing of y is read.
    """
    length = tl.where(num_tokens < SHORT_TOKENS, BLOCK_T, STRETCH)
    if (tl.program_id(1) > 0) & (tl.program_id(1) * length >= num_tokens):
        return
    first = tl.program_id(0) * BLOCK_N
    part, b_first = part_of(
        first, START_0, START_1, START_2, START_3, ROWS_0, ROWS_1, ROWS_2, ROWS_3
    )  # fmt: skip
    b_rows = b_first + tl.arange(0, BLOCK_N)
    columns = first + tl.arange(0, BLOCK_N)
    stretch = tl.program_id(1) * length
    every = stretch + tl.arange(0, STRETCH)
    of_part = shrunk_ptr + tl.maximum(part, 0) * RANK
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    is_own = (every < num_tokens) & (every < stretch + length)
    slots = tl.load(slots_ptr + every, mask=is_own & (part >= 0), other=-1)
    tokens = tl.arange(0, BLOCK_T)
    places = tokens[:, None] * N + columns[None, :]
    slot = tl.min(tl.where(slots >= 0, slots, NO_SLOT))
    least, goes_on = slot, slot >= 0
    while goes_on:
        has_b, of_b = slot < NO_SLOT, tl.where(slot < NO_SLOT, slot, 0)
        b = load_b(b_ptr, of_b, b_rows, 0, has_b, B_ROWS, RANK, BLOCK_R)
        for at in tl.range(0, length, BLOCK_T, num_stages=STAGES):
            block = (stretch + at).to(tl.int64)
            is_token = block + tokens < num_tokens
            if ADDS:
                y = tl.load(y_ptr + block * N + places, mask=is_token[:, None], other=0.0)
            own = tl.load(slots_ptr + block + tokens, mask=is_token & (part >= 0), other=-1)
            added = product_of(
                of_part + block * A_ROWS, tokens, is_token, own == slot,
                b, b_ptr, of_b, b_rows, has_b, B_ROWS, RANK, A_ROWS, BLOCK_R, EXACT,
            )  # fmt: skip
            if ADDS:
                added = y.to(tl.float32) + added  # type: ignore[possibly-undefined]  # ADDS gave it
            is_stored = is_token & ((own == slot) | ((own < 0) & (slot == least)))
            tl.store(out_ptr + block * N + places, added.to(out_ptr.dtype.element_ty), mask=is_stored[:, None])
        slot = tl.min(tl.where(slots > slot, slots, NO_SLOT))
        goes_on = slot < NO_SLOT


def parts_of(starts: Sequence[int], rows: Sequence[int]) -> dict[str, int]:
    """The arguments of part_of for these parts."""
    none = [0] * (MOST_PARTS - len(rows))
    found: dict[str, int] = {}
    for at, (start, count) in enumerate(zip((*starts, *none), (*rows, *none), strict=True)):
        found |= {f"START_{at}": start, f"ROWS_{at}": count}
    return found


def written(
    y: torch.Tensor | None,
    shrunk: torch.Tensor,
    b: torch.Tensor,
    slots: torch.Tensor,
    starts: Sequence[int],
    rows: Sequence[int],
    out: torch.Tensor,
    is_launched: int | torch.SymInt = 1,
) -> torch.Tensor:
    """Gives `out` [..., N], into which it writes what lora_expand does of many tokens; without y what that adds.

    Where `is_launched` is 0 nothing is written.
    """
    outputs, num_tokens, rank = out.shape[-1], math.prod(out.shape[:-1]), b.shape[2]
    block_n = block_of_columns(outputs, starts, rows)
    further = SHORT_TOKENS // WRITTEN_TOKENS - SHORT_TOKENS // STRETCH_TOKENS  # of a short step
    shared_bytes = most_shared_bytes() if torch.cuda.is_available() else _LEAST_SHARED_BYTES
    stretches = (triton.cdiv(num_tokens, STRETCH_TOKENS) + further) * is_launched
    wrap_triton(stretch_kernel)[outputs // block_n, stretches](
        shrunk if y is None else y,
        shrunk,
        b,
        slots,
        out,
        num_tokens,
        N=outputs,
        B_ROWS=b.shape[1],
        RANK=rank,
        A_ROWS=shrunk.shape[2],
        **parts_of(starts, rows),
        STRETCH=STRETCH_TOKENS,
        SHORT_TOKENS=SHORT_TOKENS,
        BLOCK_T=WRITTEN_TOKENS,
        BLOCK_N=block_n,
        BLOCK_R=padded_rank(rank),
        # Of writes alone nothing is worth asking for ahead: qkv's of 8,192 tokens took 46 µs with three stages, 34 so.
        STAGES=1 if y is None else stages_of(rank, block_n, b.element_size(), shared_bytes),
        ADDS=y is not None,
        EXACT=out.dtype == torch.float32,
        EARLY=starts_early(),
        num_warps=4,
    )
    return out
