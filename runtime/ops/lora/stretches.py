"""The kernel that adds to outputs of many tokens what their adapters change: B times the products with A.

It is bound by reading and writing outputs. So a block takes a stretch of tokens, whose next ones are on their way while
some are computed. Of prompts neighbours mostly have one adapter, whose B is read once then. Else a block reads B of all
slots that its tokens have, as one matrix, which it multiplies with zeros of other slots. Of too many, and in float32,
it goes through them.

Shape legend: T tokens, N outputs of a linear, P of its parts with adapters, r their rank, L slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mllm_compile.runtime.ops.dependent_launch import start_dependents, wait_for_prerequisites
from mllm_compile.runtime.ops.lora.shrink import NO_SLOT


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
def add_product(
    added: tl.tensor,
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
    """Adds B of a slot times what the tokens that have it have of a part's A, from `shrunk_ptr` on.

    All tokens' products are loaded, so that no load waits for slots; of those without an adapter they are any bits.
    """
    for r in tl.static_range(0, RANK, BLOCK_R):
        ranks = r + tl.arange(0, BLOCK_R)
        mask = is_token[:, None] & (ranks < RANK)[None, :]
        shrunk = tl.load(shrunk_ptr + (tokens[:, None] * A_ROWS + ranks[None, :]), mask=mask, other=0.0)
        shrunk = tl.where(has_slot[:, None], shrunk, 0.0)
        if r > 0:
            b = load_b(b_ptr, slot, b_rows, r, is_there, B_ROWS, RANK, BLOCK_R)
        added = tl.dot(shrunk.to(b.dtype), b, added, input_precision="ieee" if EXACT else "tf32")
    return added


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
    ALL_RANKS: tl.constexpr,
    STRETCH: tl.constexpr,
    SHORT_TOKENS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """BLOCK_N outputs, all in one part or in none, of STRETCH tokens, BLOCK_T at a time: program (outputs, stretch).

    Of fewer than SHORT_TOKENS a stretch is BLOCK_T tokens, as blocks would be few.
    """
    length = tl.where(num_tokens < SHORT_TOKENS, BLOCK_T, STRETCH)
    if (tl.program_id(1) > 0) & (tl.program_id(1) * length >= num_tokens):
        return
    first = tl.program_id(0) * BLOCK_N
    in_0 = (first >= START_0) & (first < START_0 + ROWS_0)
    in_1 = (first >= START_1) & (first < START_1 + ROWS_1)
    in_2 = (first >= START_2) & (first < START_2 + ROWS_2)
    in_3 = (first >= START_3) & (first < START_3 + ROWS_3)
    part = tl.where(in_0, 0, tl.where(in_1, 1, tl.where(in_2, 2, tl.where(in_3, 3, -1))))
    b_first = tl.where(in_1, first - START_1 + ROWS_0, first - START_0)
    b_first = tl.where(in_2, first - START_2 + ROWS_0 + ROWS_1, b_first)
    b_first = tl.where(in_3, first - START_3 + ROWS_0 + ROWS_1 + ROWS_2, b_first)
    b_rows = b_first + tl.arange(0, BLOCK_N)
    columns = first + tl.arange(0, BLOCK_N)
    stretch = tl.program_id(1).to(tl.int64) * length
    every = stretch + tl.arange(0, STRETCH)
    of_part = shrunk_ptr + tl.maximum(part, 0) * RANK
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    is_own = (every < num_tokens) & (every < stretch + length)
    slots = tl.load(slots_ptr + every, mask=is_own & (part >= 0), other=-1)
    most, least = tl.max(slots), tl.min(tl.where(slots >= 0, slots, NO_SLOT))
    tokens = tl.arange(0, BLOCK_T)
    places = tokens[:, None] * N + columns[None, :]
    if least >= most:
        slot = tl.maximum(most, 0)
        b = load_b(b_ptr, slot, b_rows, 0, most >= 0, B_ROWS, RANK, BLOCK_R)
        for at in tl.range(0, length, BLOCK_T, num_stages=STAGES):
            block = stretch + at
            is_token = block + tokens < num_tokens
            y = tl.load(y_ptr + block * N + places, mask=is_token[:, None], other=0.0)
            own = tl.load(slots_ptr + block + tokens, mask=is_token & (part >= 0), other=-1)
            added = add_product(
                tl.zeros((BLOCK_T, BLOCK_N), tl.float32), of_part + block * A_ROWS, tokens, is_token, own == slot,
                b, b_ptr, slot, b_rows, most >= 0, B_ROWS, RANK, A_ROWS, BLOCK_R, EXACT,
            )  # fmt: skip
            out = y.to(tl.float32) + added
            tl.store(out_ptr + block * N + places, out.to(y.dtype), mask=is_token[:, None])
    elif ALL_RANKS > 0:
        every_rank = tl.arange(0, ALL_RANKS)
        of_slot, rank = every_rank // RANK, every_rank % RANK
        is_used = tl.max((slots[:, None] == of_slot[None, :]).to(tl.int32), 0) > 0
        b_places = b_ptr + of_slot[:, None].to(tl.int64) * B_ROWS * RANK + b_rows[None, :] * RANK + rank[:, None]
        of_slots = tl.load(b_places, mask=is_used[:, None], other=0.0)
        for at in tl.range(0, length, BLOCK_T, num_stages=STAGES):
            block = stretch + at
            is_token = block + tokens < num_tokens
            y = tl.load(y_ptr + block * N + places, mask=is_token[:, None], other=0.0)
            own = tl.load(slots_ptr + block + tokens, mask=is_token & (part >= 0), other=-1)
            its = of_part + block * A_ROWS + (tokens[:, None] * A_ROWS + rank[None, :])
            shrunk = tl.load(its, mask=own[:, None] == of_slot[None, :], other=0.0)
            added = tl.dot(shrunk.to(of_slots.dtype), of_slots, input_precision="ieee" if EXACT else "tf32")
            out = y.to(tl.float32) + added
            tl.store(out_ptr + block * N + places, out.to(y.dtype), mask=is_token[:, None])
    else:
        for at in range(0, length, BLOCK_T):
            block = stretch + at
            is_token = block + tokens < num_tokens
            y = tl.load(y_ptr + block * N + places, mask=is_token[:, None], other=0.0)
            own = tl.load(slots_ptr + block + tokens, mask=is_token & (part >= 0), other=-1)
            added = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
            slot = tl.min(tl.where(own >= 0, own, NO_SLOT))
            while slot < NO_SLOT:
                b = load_b(b_ptr, slot, b_rows, 0, True, B_ROWS, RANK, BLOCK_R)
                added = add_product(
                    added, of_part + block * A_ROWS, tokens, is_token, own == slot,
                    b, b_ptr, slot, b_rows, True, B_ROWS, RANK, A_ROWS, BLOCK_R, EXACT,
                )  # fmt: skip
                slot = tl.min(tl.where(own > slot, own, NO_SLOT))
            out = y.to(tl.float32) + added
            tl.store(out_ptr + block * N + places, out.to(y.dtype), mask=is_token[:, None])
