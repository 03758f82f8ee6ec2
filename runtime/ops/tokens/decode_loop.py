"""The work before and after the model in a captured decode: inputs made ready, tokens chosen and handed on.

Triton by hand, as `torch.library.triton_op`: pieces of the program (mllm_compile/kernels/decode_loop.py). Only the
piece compiler imports this module: a loaded package needs neither Triton nor these ops. cuda_graph/decode_loop.py
explains the tensors, and what writes them when.

Shape legend: S rows of the captured step, M most rows of any, R rows of the slot table and C columns, W pages of a row,
V vocab, B blocks of BLOCK logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.tokens.draw import BLOCKS_AT_ONCE, block_sums, draw_block, draw_within, product
from mllm_compile.runtime.ops.tokens.greedy import inf_where_no_number, token_if_finite
from mllm_compile.runtime.ops.tokens.replay_slots import REPLAY_SLOTS, REQUEST_FIELDS
from mllm_compile.runtime.sampling.counter_rng import BLOCK
from mllm_compile.runtime.sampling.state import IS_GREEDY, SEED, TEMPERATURE

_PAGES_AT_ONCE = 512  # of one program


@triton.jit
def _begin_kernel(
    replay_slot_ptr: tl.tensor,
    requests_ptr: tl.tensor,
    last_tokens_ptr: tl.tensor,
    req_to_token_ptr: tl.tensor,
    input_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    out_cache_loc_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    num_slot_rows: tl.tensor,
    num_columns: tl.tensor,
    num_pages: tl.tensor,
    FIELDS: tl.constexpr,
    PAGE: tl.constexpr,
    PADDED_PAGE: tl.constexpr,
    PAGES_AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Runs one program a request."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    request = tl.program_id(0).to(tl.int64)
    entry = requests_ptr + (tl.load(replay_slot_ptr) * num_slot_rows + request) * FIELDS
    # The host's memory, which had another step's requests the last time: read anew, past caches.
    row = tl.load(entry, cache_modifier=".cv").to(tl.int64)
    if row >= 0:
        seq_len = tl.load(entry + 1, cache_modifier=".cv")
        slot = tl.load(entry + 2, cache_modifier=".cv")
        tl.store(input_ids_ptr + request, tl.load(last_tokens_ptr + row))
        position = tl.maximum(seq_len - 1, 0)  # padding may have no token at all
        delta = tl.load(entry + 3, cache_modifier=".cv")  # of a prompt with images; else 0
        tl.store(positions_ptr + request, (position + delta).to(tl.int64))
        tl.store(out_cache_loc_ptr + request, slot.to(tl.int64))
        tl.store(rows_ptr + request, row)
        tl.store(seq_lens_ptr + request, seq_len)
        # The token's own page may be new: it is entered here, and not read again.
        own_page, last = slot // PAGE, position // PAGE
        own_slots_ptr = req_to_token_ptr + row * num_columns
        within = tl.arange(0, PADDED_PAGE)
        tl.store(own_slots_ptr + last * PAGE + within, own_page * PAGE + within, mask=within < PAGE)
        for start in range(0, last + 1, PAGES_AT_ONCE):
            index = start + tl.arange(0, PAGES_AT_ONCE)
            first_rows = tl.load(own_slots_ptr + index * PAGE, mask=index < last, other=0)
            pages = tl.where(index == last, own_page, first_rows // PAGE)
            tl.store(page_table_ptr + request * num_pages + index, pages, mask=index <= last)


@triton_op(
    "mllm::begin_decode",
    mutates_args={
        "req_to_token",
        "input_ids",
        "positions",
        "out_cache_loc",
        "rows",
        "seq_lens",
        "page_table",
    },
)
def begin_decode(
    replay_slot: torch.Tensor,
    requests: torch.Tensor,
    last_tokens: torch.Tensor,
    req_to_token: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    out_cache_loc: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
) -> None:
    """Reads a decode step's inputs as the host wrote them into this replay slot. With a row < 0 they are in place.

    Args:
        replay_slot: [2] int64; the first is the number of this replay's slot.
        requests: [REPLAY_SLOTS, M, REQUEST_FIELDS] int32: row, tokens with the new one, slot of the new one, and what
            its position is beyond its index. A row without tokens is at position 0.
        last_tokens: [R] int64, the newest token of each row.
        req_to_token: [R, C] int32; the page of the new token is entered.
        input_ids, positions, out_cache_loc, rows: [S] int64; seq_lens: [S] int32; written.
        page_table: [S, W] int32; of each row as many entries as it has pages are written.
    """
    num_rows = input_ids.shape[0]
    wrap_triton(_begin_kernel)[(num_rows,)](
        replay_slot,
        requests,
        last_tokens,
        req_to_token,
        input_ids,
        positions,
        out_cache_loc,
        rows,
        seq_lens,
        page_table,
        requests.shape[1],
        req_to_token.shape[1],
        page_table.shape[1],
        FIELDS=REQUEST_FIELDS,
        PAGE=page_size,
        PADDED_PAGE=triton.next_power_of_2(page_size),
        PAGES_AT_ONCE=_PAGES_AT_ONCE,
        EARLY=starts_early(),
        num_warps=4,
    )


@triton.jit
def _block_numbers_kernel(
    logits_ptr: tl.tensor,
    floats_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    replay_slot_ptr: tl.tensor,
    numbers_ptr: tl.tensor,
    num_table_rows: tl.tensor,
    V: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    IS_GREEDY: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Reduces each block of a row: to its largest logit if the row is greedy, else to the logsumexp of its scores.

    Where a logit of the block is no number, inf.
    """
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(replay_slot_ptr + 1, tl.load(replay_slot_ptr))  # for the next kernel, which sets the first
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows_ptr + row)
    blocks = tl.program_id(1) * BLOCKS_AT_ONCE + tl.arange(0, BLOCKS_AT_ONCE)
    columns = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    logits = tl.load(logits_ptr + row * V + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
    logits = inf_where_no_number(logits)
    if tl.load(ints_ptr + IS_GREEDY * num_table_rows + slot) != 0:
        numbers = tl.max(logits, 1)
    else:
        numbers = block_sums(product(logits, tl.div_rn(1.0, tl.load(floats_ptr + TEMPERATURE * num_table_rows + slot))))
    tl.store(numbers_ptr + row * B + blocks, numbers, mask=blocks < B)


@triton.jit
def _end_kernel(
    logits_ptr: tl.tensor,
    floats_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    numbers_ptr: tl.tensor,
    replay_slot_ptr: tl.tensor,
    last_tokens_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    num_table_rows: tl.tensor,
    num_slot_rows: tl.tensor,
    V: tl.constexpr,
    B: tl.constexpr,
    PADDED_B: tl.constexpr,
    BLOCK: tl.constexpr,
    REPLAY_SLOTS: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    SEED: tl.constexpr,
    IS_GREEDY: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Chooses a row's block, and the token in it, as ops/tokens/greedy.py and ops/tokens/draw.py do."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    row = tl.program_id(0).to(tl.int64)
    this_slot = tl.load(replay_slot_ptr + 1)
    slot = tl.load(rows_ptr + row)
    blocks = tl.arange(0, PADDED_B)
    within = tl.arange(0, BLOCK)
    numbers = tl.load(numbers_ptr + row * B + blocks, mask=blocks < B, other=float("-inf"))
    if tl.load(ints_ptr + IS_GREEDY * num_table_rows + slot) != 0:
        block = tl.min(tl.where(numbers == tl.max(numbers, 0), blocks, B - 1), 0)
        columns = block * BLOCK + within
        logits = tl.load(logits_ptr + row * V + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
        place = tl.min(tl.where(logits == tl.max(logits, 0), within, BLOCK - 1), 0)
    else:
        seed, position = tl.load(ints_ptr + SEED * num_table_rows + slot), tl.load(seq_lens_ptr + row).to(tl.int64)
        block = draw_block(numbers, blocks, seed, position)
        columns = block * BLOCK + within
        logits = tl.load(logits_ptr + row * V + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
        scores = product(logits, tl.div_rn(1.0, tl.load(floats_ptr + TEMPERATURE * num_table_rows + slot)))
        place = draw_within(scores, within, seed, position, B)
    token = token_if_finite(tl.minimum(block * BLOCK + place, V - 1), tl.max(numbers, 0)).to(tl.int64)
    tl.store(tokens_ptr + row, token)
    # A step may be under way before the host knows that there was no token: its embedding needs an id. Slot 0 is
    # padding's.
    tl.store(last_tokens_ptr + slot, tl.maximum(token, 0), mask=slot > 0)
    tl.store(chosen_ptr + this_slot * num_slot_rows + row, token)
    if row == 0:
        tl.store(replay_slot_ptr, (this_slot + 1) % REPLAY_SLOTS)


@triton_op("mllm::end_decode", mutates_args={"replay_slot", "last_tokens", "chosen"})
def end_decode(
    logits: torch.Tensor,
    floats: torch.Tensor,
    ints: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    replay_slot: torch.Tensor,
    last_tokens: torch.Tensor,
    chosen: torch.Tensor,
) -> torch.Tensor:
    """Chooses each row's token, the most probable or a draw at its temperature, and hands it on to the next step.

    Args:
        logits: [S, V], contiguous, any float dtype; computed with in float32.
        floats, ints: [parameters, R] float32 and int64, as SamplingState has them.
        rows: [S] int64; seq_lens: [S] int32, the positions of the draws.
        replay_slot: [2] int64; the first becomes the number of the next replay's slot.
        last_tokens: [R] int64; the places of `rows` are written, 0 without a token.
        chosen: [REPLAY_SLOTS, M] int64; the first S of this replay's slot are written, for the host.

    Returns:
        The tokens [S] int64, each under V, or NO_TOKEN: a row's logits hold NaN or inf, or nothing but
        -inf.
    """
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    numbers = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((num_rows,), dtype=torch.int64, device=logits.device)
    constants = {
        "V": vocab_size,
        "B": num_blocks,
        "BLOCK": BLOCK,
        "TEMPERATURE": TEMPERATURE,
        "IS_GREEDY": IS_GREEDY,
        "EARLY": starts_early(),
    }
    wrap_triton(_block_numbers_kernel)[(num_rows, triton.cdiv(num_blocks, BLOCKS_AT_ONCE))](
        logits,
        floats,
        ints,
        rows,
        replay_slot,
        numbers,
        floats.shape[1],
        BLOCKS_AT_ONCE=BLOCKS_AT_ONCE,
        num_warps=4,
        **constants,
    )
    wrap_triton(_end_kernel)[(num_rows,)](
        logits,
        floats,
        ints,
        rows,
        seq_lens,
        numbers,
        replay_slot,
        last_tokens,
        chosen,
        tokens,
        floats.shape[1],
        chosen.shape[1],
        PADDED_B=triton.next_power_of_2(num_blocks),
        REPLAY_SLOTS=REPLAY_SLOTS,
        SEED=SEED,
        num_warps=8,
        **constants,
    )
    return tokens
