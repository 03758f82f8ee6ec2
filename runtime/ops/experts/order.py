"""The rows of each expert, in blocks: what grouped.py multiplies by one weight.

Triton by hand, as `torch.library.triton_op`, so that AOTInductor puts the compiled kernels into the piece's package.
Only the piece compiler imports this module: a loaded package needs neither Triton nor this op.

Rows stand in order of their expert, then of their token, so the order is the same whenever the ids are. A small step
takes one program. In a larger one chunks of tokens are counted side by side, one program adds up, and chunks enter
their rows.

Shape legend: T tokens, k experts a token, E experts, C chunks, N blocks of B rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.experts.shapes import most_blocks, tokens_at_once

_COUNTS_AT_ONCE = 4096
_BLOCKS_AT_ONCE = 4096


@triton.jit
def _load_ids(ids_ptr, slots_ptr, tokens, num_tokens, choice, E: tl.constexpr, K: tl.constexpr):
    """The experts of one choice, where there is one; whether the token is one, and whether it is no padding."""
    is_token = tokens < num_tokens
    is_real = is_token & (tl.load(slots_ptr + tokens, mask=is_token, other=0) > 0)
    ids = tl.load(ids_ptr + tokens.to(tl.int64) * K + choice, mask=is_real, other=-1)
    return ids, is_token, is_real, is_real & (ids >= 0) & (ids < E)


@triton.jit
def _count(ids_ptr, slots_ptr, tokens, num_tokens, experts, E: tl.constexpr, K: tl.constexpr):
    """How often each token chose each expert, and how many of these tokens' rows no expert has."""
    ids, is_token, _, is_chosen = _load_ids(ids_ptr, slots_ptr, tokens, num_tokens, 0, E, K)
    chosen = (is_chosen[:, None] & (ids[:, None] == experts[None, :])).to(tl.int32)
    skipped = tl.sum((is_token & (is_chosen == 0)).to(tl.int32), 0)
    for choice in range(1, K):
        ids, is_token, _, is_chosen = _load_ids(ids_ptr, slots_ptr, tokens, num_tokens, choice, E, K)
        chosen += (is_chosen[:, None] & (ids[:, None] == experts[None, :])).to(tl.int32)
        skipped += tl.sum((is_token & (is_chosen == 0)).to(tl.int32), 0)
    return chosen, skipped


@triton.jit
def _enter_rows(
    ids_ptr, slots_ptr, order_ptr, tokens, num_tokens, experts, places, skipped_place, E: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """Writes each row at its place: `places` [tokens, experts], that of a token's first row at an expert.

    A row that no expert has is written behind the others: as it is if it is padding, inverted if its id is no expert's.
    """
    for choice in range(K):
        ids, is_token, is_real, is_chosen = _load_ids(ids_ptr, slots_ptr, tokens, num_tokens, choice, E, K)
        rows = (tokens * K + choice).to(tl.int32)
        is_own = is_chosen[:, None] & (ids[:, None] == experts[None, :])
        tl.store(order_ptr + tl.sum(tl.where(is_own, places, 0), 1), rows, mask=is_chosen)
        places += is_own.to(tl.int32)
        is_skipped = is_token & (is_chosen == 0)
        ranks = tl.cumsum(is_skipped.to(tl.int32), 0) - 1
        tl.store(order_ptr + skipped_place + ranks, tl.where(is_real, -1 - rows, rows), mask=is_skipped)
        skipped_place += tl.sum(is_skipped.to(tl.int32), 0)


@triton.jit
def _enter_blocks(
    blocks_ptr, num_blocks, experts, counts, ends, num_skipped, B: tl.constexpr, BLOCKS_AT_ONCE: tl.constexpr
):  # fmt: skip
    """Writes each block's expert and how many rows it has. `ends`: the blocks up to an expert's last, included."""
    of_experts = tl.max(ends, 0)
    starts = ends - (counts + B - 1) // B
    for first in range(0, num_blocks, BLOCKS_AT_ONCE):
        blocks = first + tl.arange(0, BLOCKS_AT_ONCE)
        owners = tl.sum((ends[None, :] <= blocks[:, None]).to(tl.int32), 1)
        is_owner = owners[:, None] == experts[None, :]
        start = tl.sum(tl.where(is_owner, starts[None, :], 0), 1)
        rows = tl.sum(tl.where(is_owner, counts[None, :], 0), 1) - (blocks - start) * B
        is_skipped = blocks >= of_experts
        rows = tl.where(is_skipped, num_skipped - (blocks - of_experts) * B, rows)
        is_block = blocks < num_blocks
        tl.store(blocks_ptr + 2 * blocks, tl.where(is_skipped, -1, owners), mask=is_block)
        tl.store(blocks_ptr + 2 * blocks + 1, tl.minimum(tl.maximum(rows, 0), B), mask=is_block)


@triton.jit
def _order_kernel(
    ids_ptr,
    slots_ptr,
    order_ptr,
    blocks_ptr,
    num_tokens,
    num_blocks,
    E: tl.constexpr,
    K: tl.constexpr,
    B: tl.constexpr,
    PADDED_E: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program for all tokens."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    tokens = tl.arange(0, TOKENS)
    experts = tl.arange(0, PADDED_E)
    chosen, num_skipped = _count(ids_ptr, slots_ptr, tokens, num_tokens, experts, E, K)
    counts = tl.sum(chosen, 0)
    ends = tl.cumsum((counts + B - 1) // B, 0)
    starts = ends - (counts + B - 1) // B
    places = starts[None, :] * B + tl.cumsum(chosen, 0) - chosen
    _enter_rows(ids_ptr, slots_ptr, order_ptr, tokens, num_tokens, experts, places, tl.max(ends, 0) * B, E, K)
    _enter_blocks(blocks_ptr, num_blocks, experts, counts, ends, num_skipped, B, BLOCKS_AT_ONCE)


@triton.jit
def _count_kernel(
    ids_ptr,
    slots_ptr,
    counts_ptr,
    skipped_ptr,
    num_tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    PADDED_E: tl.constexpr,
    TOKENS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Counts one chunk of tokens."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    chunk = tl.program_id(0)
    tokens = chunk * TOKENS + tl.arange(0, TOKENS)
    experts = tl.arange(0, PADDED_E)
    chosen, skipped = _count(ids_ptr, slots_ptr, tokens, num_tokens, experts, E, K)
    tl.store(counts_ptr + chunk * PADDED_E + experts, tl.sum(chosen, 0))
    tl.store(skipped_ptr + chunk, skipped)


@triton.jit
def _add_up_kernel(
    counts_ptr,
    skipped_ptr,
    blocks_ptr,
    num_chunks,
    num_blocks,
    B: tl.constexpr,
    PADDED_E: tl.constexpr,
    CHUNKS_AT_ONCE: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Replaces counts of chunks by the places where a chunk's rows begin, and writes the blocks. One program."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    experts = tl.arange(0, PADDED_E)
    counts = tl.zeros((PADDED_E,), tl.int32)
    num_skipped = tl.sum(tl.zeros((CHUNKS_AT_ONCE,), tl.int32), 0)
    for first in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunks = first + tl.arange(0, CHUNKS_AT_ONCE)
        at = counts_ptr + chunks[:, None] * PADDED_E + experts[None, :]
        counts += tl.sum(tl.load(at, mask=(chunks < num_chunks)[:, None], other=0), 0)
        num_skipped += tl.sum(tl.load(skipped_ptr + chunks, mask=chunks < num_chunks, other=0), 0)
    ends = tl.cumsum((counts + B - 1) // B, 0)
    begun = (ends - (counts + B - 1) // B) * B
    begun_skipped = tl.max(ends, 0) * B
    for first in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunks = first + tl.arange(0, CHUNKS_AT_ONCE)
        is_chunk = chunks < num_chunks
        at = counts_ptr + chunks[:, None] * PADDED_E + experts[None, :]
        some = tl.load(at, mask=is_chunk[:, None], other=0)
        tl.store(at, begun[None, :] + tl.cumsum(some, 0) - some, mask=is_chunk[:, None])
        begun += tl.sum(some, 0)
        some_skipped = tl.load(skipped_ptr + chunks, mask=is_chunk, other=0)
        tl.store(skipped_ptr + chunks, begun_skipped + tl.cumsum(some_skipped, 0) - some_skipped, mask=is_chunk)
        begun_skipped += tl.sum(some_skipped, 0)
    _enter_blocks(blocks_ptr, num_blocks, experts, counts, ends, num_skipped, B, BLOCKS_AT_ONCE)


@triton.jit
def _enter_kernel(
    ids_ptr,
    slots_ptr,
    counts_ptr,
    skipped_ptr,
    order_ptr,
    num_tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    PADDED_E: tl.constexpr,
    TOKENS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Enters the rows of one chunk of tokens, which begin where _add_up_kernel says."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    chunk = tl.program_id(0)
    tokens = chunk * TOKENS + tl.arange(0, TOKENS)
    experts = tl.arange(0, PADDED_E)
    chosen, _ = _count(ids_ptr, slots_ptr, tokens, num_tokens, experts, E, K)
    begun = tl.load(counts_ptr + chunk * PADDED_E + experts)
    places = begun[None, :] + tl.cumsum(chosen, 0) - chosen
    skipped_place = tl.load(skipped_ptr + chunk)
    _enter_rows(ids_ptr, slots_ptr, order_ptr, tokens, num_tokens, experts, places, skipped_place, E, K)


@triton_op("mllm::order_experts", mutates_args={})
def order_experts(
    ids: torch.Tensor, slots: torch.Tensor, num_experts: int, block: int, takes_one_program: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists the rows t·k + j by the expert ids[t, j] that they go to.

    Args:
        ids: [T, k] int64.
        slots: [T] int64, a token's slot of the KV cache: 0 is padding, whose rows go to no expert.
        block: B, rows of a block.
        takes_one_program: steps are so small that they are not divided (`is_ordered_at_once`).

    Returns:
        order [N·B] int32, rows by blocks; and blocks [N, 2] int32: the expert of each block, and how many of its places
        in `order` hold rows. Expert -1 has the rows of no expert: those of padding, and, as -1 - row, those whose id is
        not in [0, E).
    """
    ids, slots = ids.contiguous(), slots.contiguous()
    num_tokens, num_chosen = ids.shape
    num_blocks = most_blocks(num_tokens * num_chosen, num_experts, block)
    order = torch.empty(num_blocks * block, dtype=torch.int32, device=ids.device)
    blocks = torch.empty((num_blocks, 2), dtype=torch.int32, device=ids.device)
    padded = triton.next_power_of_2(num_experts)
    chunk = tokens_at_once(num_experts)
    blocks_at_once = max(1, _BLOCKS_AT_ONCE // padded)
    same = {"E": num_experts, "K": num_chosen, "PADDED_E": padded, "TOKENS": chunk, "EARLY": starts_early()}
    if takes_one_program:
        wrap_triton(_order_kernel)[(1,)](
            ids,
            slots,
            order,
            blocks,
            num_tokens,
            num_blocks,
            B=block,
            BLOCKS_AT_ONCE=blocks_at_once,
            num_warps=8,
            **same,
        )
        return order, blocks
    num_chunks = (num_tokens + chunk - 1) // chunk
    counts = torch.empty((num_chunks, padded), dtype=torch.int32, device=ids.device)
    skipped = torch.empty(num_chunks, dtype=torch.int32, device=ids.device)
    wrap_triton(_count_kernel)[(num_chunks,)](ids, slots, counts, skipped, num_tokens, num_warps=8, **same)
    wrap_triton(_add_up_kernel)[(1,)](
        counts,
        skipped,
        blocks,
        num_chunks,
        num_blocks,
        B=block,
        PADDED_E=padded,
        CHUNKS_AT_ONCE=max(1, _COUNTS_AT_ONCE // padded),
        BLOCKS_AT_ONCE=blocks_at_once,
        EARLY=starts_early(),
        num_warps=8,
    )
    wrap_triton(_enter_kernel)[(num_chunks,)](ids, slots, counts, skipped, order, num_tokens, num_warps=8, **same)
    return order, blocks
