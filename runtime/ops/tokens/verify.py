"""The work before and after the model in a captured verify step: drafts and inputs made, drafts accepted or not.

Triton by hand, as `torch.library.triton_op`: pieces of the program (mllm_compile/kernels/verify.py). Only the piece
compiler imports this module: a loaded package needs neither Triton nor these ops. cuda_graph/verify_loop.py explains
the tensors, and what writes them when.

Shape legend: R requests of the captured step, C tokens of each, M rows of the slot table, L tokens of a row's history,
W pages of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.tokens.draw import uniform
from mllm_compile.runtime.ops.tokens.verify_fields import (
    DRAFT_FIELD,
    DRAFTED_FIELDS,
    MOST_DRAFTED,
    RESULT_FIELDS,
    VERIFY_FIELDS,
)
from mllm_compile.runtime.sampling.acceptance import SYNTHETIC
from mllm_compile.runtime.sampling.state import SEED

_AT_ONCE = 1024  # places of a history that are compared
_PAGES_AT_ONCE = 512


@triton.jit
def _distance_of_repeat(
    tokens_ptr: tl.tensor, count: tl.tensor, shortest: tl.tensor, longest: tl.tensor, AT_ONCE: tl.constexpr
) -> tl.tensor:
    """speculation/ngram.py's distance_of_repeat, of the first `count` tokens."""
    best = count.to(tl.int64) * 0
    for start in range(0, count - 1, AT_ONCE):
        ends = start + tl.arange(0, AT_ONCE)
        agrees = ends < count - 1
        length = tl.zeros([AT_ONCE], dtype=tl.int64)
        for back in range(longest):
            agrees = agrees & (ends >= back) & (back < count)
            newest = tl.load(tokens_ptr + tl.maximum(count - 1 - back, 0))
            agrees = agrees & (tl.load(tokens_ptr + ends - back, mask=agrees, other=-1) == newest)
            length += agrees.to(tl.int64)
        # The longest counts, then the latest.
        found = tl.where(length >= shortest, (length << 32) + ends, 0)
        best = tl.maximum(best, tl.max(found, 0))
    distance = count.to(tl.int64) - 1 - (best & 0xFFFFFFFF)
    return tl.where(best > 0, distance, 0).to(tl.int32)


@triton.jit
def _begin_kernel(
    fields_ptr: tl.tensor,
    settings_ptr: tl.tensor,
    last_tokens_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    history_ptr: tl.tensor,
    req_to_token_ptr: tl.tensor,
    input_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    out_cache_loc_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    drafted_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_history: tl.tensor,
    num_columns: tl.tensor,
    num_pages: tl.tensor,
    FIELDS: tl.constexpr,
    DRAFT_FIELD: tl.constexpr,
    DRAFTED: tl.constexpr,
    MOST_TOKENS: tl.constexpr,
    PAGE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PAGES_AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Runs one program a request."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    request = tl.program_id(0).to(tl.int64)
    entry = fields_ptr + request * FIELDS
    row = tl.load(entry).to(tl.int64)
    known, most, given, delta = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
    length = tl.where(known >= 0, known, tl.load(lengths_ptr + row))
    is_request = row > 0

    # The draft: the host's, or what followed the newest tokens before.
    own_history = history_ptr + row * num_history
    drafts_here = is_request & (given < 0) & (most > 0)
    searched = tl.where(drafts_here, length + 1, 0)
    shortest, longest = tl.load(settings_ptr), tl.load(settings_ptr + 1)
    distance = _distance_of_repeat(own_history, searched, shortest, longest, AT_ONCE)
    # What a synthetic acceptance fills drafts with is how the text begins: other tokens, that choose other experts.
    fills = drafts_here & (tl.load(settings_ptr + 2) != 0)
    distance = tl.where((distance == 0) & fills, length + 1, distance)
    found = tl.where(distance > 0, most, 0)
    num_drafted = tl.minimum(tl.where(given >= 0, tl.minimum(given, most), found), num_tokens - 1)
    num_drafted = tl.where(is_request, num_drafted, 0)
    columns = tl.arange(0, MOST_TOKENS)
    places = tl.maximum(columns - 1, 0)  # in the draft
    newest = tl.load(last_tokens_ptr + row)
    is_drafted = (columns > 0) & (columns <= num_drafted)
    sources = length + 1 - distance + places % tl.maximum(distance, 1)
    looked_up = tl.load(own_history + sources, mask=is_drafted & (distance > 0), other=0).to(tl.int64)
    of_host = tl.load(entry + DRAFT_FIELD + places, mask=is_drafted & (given >= 0), other=0).to(tl.int64)
    drafts = tl.where(given >= 0, of_host, looked_up)
    left = drafted_ptr + request * DRAFTED
    tl.store(left, length)
    tl.store(left + 1, num_drafted)
    tl.store(left + 2 + places, drafts.to(tl.int32), mask=is_drafted)

    # The inputs. What no draft fills is padding.
    is_token = (columns <= num_drafted) & is_request
    index = request * num_tokens + columns
    has_place = columns < num_tokens
    indices = length + columns
    own_slots = req_to_token_ptr + row * num_columns
    slots = tl.load(own_slots + indices, mask=is_token, other=0)
    tl.store(input_ids_ptr + index, tl.where(is_token, tl.where(columns == 0, newest, drafts), 0), mask=has_place)
    tl.store(positions_ptr + index, tl.where(is_token, indices + delta, 0).to(tl.int64), mask=has_place)
    tl.store(out_cache_loc_ptr + index, slots.to(tl.int64), mask=has_place)
    tl.store(rows_ptr + index, tl.where(is_token, row, 0), mask=has_place)
    tl.store(seq_lens_ptr + index, tl.where(is_token, indices + 1, 0), mask=has_place)
    last = (length + num_drafted) // PAGE
    num_listed = tl.where(is_request, last + 1, 0)
    for start in range(0, num_listed, PAGES_AT_ONCE):
        page = start + tl.arange(0, PAGES_AT_ONCE)
        is_page = page < num_listed
        ids = tl.load(own_slots + page * PAGE, mask=is_page, other=0) // PAGE
        for column in range(num_drafted + 1):
            tl.store(page_table_ptr + (request * num_tokens + column) * num_pages + page, ids, mask=is_page)


@triton_op(
    "mllm::begin_verify",
    mutates_args={
        "input_ids",
        "positions",
        "out_cache_loc",
        "rows",
        "seq_lens",
        "page_table",
        "drafted",
    },
)
def begin_verify(
    fields: torch.Tensor,
    settings: torch.Tensor,
    last_tokens: torch.Tensor,
    lengths: torch.Tensor,
    history: torch.Tensor,
    req_to_token: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    out_cache_loc: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    drafted: torch.Tensor,
    page_size: int,
) -> None:
    """Makes the inputs of a verify step: of each request its newest token, its draft, and padding behind.

    A token of padding is one of row 0 without keys.

    Args:
        fields: [R, VERIFY_FIELDS] int32 and settings: [NUM_SETTINGS] int32, see verify_fields.py. The slots of all
            tokens that a request may get are in the table.
        last_tokens: [M] int64, the newest token of each row.
        lengths: [M] int32, tokens in the KV cache; history: [M, L] int32, all tokens, the newest too. Read of rows
            whose length or draft is the device's.
        req_to_token: [M, columns] int32.
        input_ids, positions, out_cache_loc, rows: [R, C] int64; seq_lens: [R, C] int32; written.
        page_table: [R, C, W] int32; of each token as many entries as its request has pages are written.
        drafted: [R, DRAFTED_FIELDS] int32, for end_verify.
    """
    num_requests, num_tokens = input_ids.shape
    wrap_triton(_begin_kernel)[(num_requests,)](
        fields,
        settings,
        last_tokens,
        lengths,
        history,
        req_to_token,
        input_ids,
        positions,
        out_cache_loc,
        rows,
        seq_lens,
        page_table,
        drafted,
        num_tokens,
        history.shape[1],
        req_to_token.shape[1],
        page_table.shape[2],
        FIELDS=VERIFY_FIELDS,
        DRAFT_FIELD=DRAFT_FIELD,
        DRAFTED=DRAFTED_FIELDS,
        MOST_TOKENS=MOST_DRAFTED + 1,
        PAGE=page_size,
        AT_ONCE=_AT_ONCE,
        PAGES_AT_ONCE=_PAGES_AT_ONCE,
        EARLY=starts_early(),
        num_warps=4,
    )


@triton.jit
def _end_kernel(
    tokens_ptr: tl.tensor,
    fields_ptr: tl.tensor,
    drafted_ptr: tl.tensor,
    synthetic_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    last_tokens_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    history_ptr: tl.tensor,
    results_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_table_rows: tl.tensor,
    num_history: tl.tensor,
    FIELDS: tl.constexpr,
    DRAFTED: tl.constexpr,
    RESULTS: tl.constexpr,
    MOST_TOKENS: tl.constexpr,
    SEED: tl.constexpr,
    SYNTHETIC: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Runs one program a request."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(fields_ptr + request * FIELDS).to(tl.int64)
    left = drafted_ptr + request * DRAFTED
    length, num_drafted = tl.load(left), tl.load(left + 1)
    columns = tl.arange(0, MOST_TOKENS)
    chosen = tl.load(tokens_ptr + request * num_tokens + columns, mask=columns <= num_drafted, other=-1)
    is_drafted = columns < num_drafted
    drafts = tl.load(left + 2 + columns, mask=is_drafted, other=-1).to(tl.int64)
    num_accepted = tl.min(tl.where(is_drafted & (chosen == drafts), MOST_TOKENS, columns), 0)
    whole = tl.load(synthetic_ptr)
    if whole >= 0:
        seed = tl.load(ints_ptr + SEED * num_table_rows + row) ^ SYNTHETIC
        coin = uniform(seed, (length + 1).to(tl.int64), columns.to(tl.int64) + 1)
        has_more = tl.max(tl.where((columns == 0) & (coin < tl.load(synthetic_ptr + 1)), 1, 0), 0)
        num_accepted = tl.minimum(whole.to(tl.int32) + has_more, num_drafted)
        chosen = tl.where(columns < num_accepted, drafts, chosen)
    newest = tl.sum(tl.where(columns == num_accepted, chosen, 0), 0)
    is_request = row > 0
    # As in a decode the next step's embedding needs an id, also where there was no token.
    tl.store(last_tokens_ptr + row, tl.maximum(newest, 0), mask=is_request)
    tl.store(lengths_ptr + row, length + num_accepted + 1, mask=is_request)
    index = length + 1 + columns
    is_kept = (columns <= num_accepted) & (index < num_history) & is_request
    tl.store(history_ptr + row * num_history + index, tl.maximum(chosen, 0).to(tl.int32), mask=is_kept)
    result = results_ptr + request * RESULTS
    tl.store(result, (num_accepted + 1).to(tl.int64))
    tl.store(result + 1, num_drafted.to(tl.int64))
    tl.store(result + 2 + columns, chosen)


@triton_op("mllm::end_verify", mutates_args={"last_tokens", "lengths", "history", "results"})
def end_verify(
    tokens: torch.Tensor,
    fields: torch.Tensor,
    drafted: torch.Tensor,
    synthetic: torch.Tensor,
    ints: torch.Tensor,
    last_tokens: torch.Tensor,
    lengths: torch.Tensor,
    history: torch.Tensor,
    results: torch.Tensor,
) -> None:
    """Accepts of each draft what was chosen as well, as sampling/acceptance.py does, and notes the tokens of each row.

    Args:
        tokens: [R, C] int64: the choice behind each token of the step.
        fields, drafted: as begin_verify has read and left them.
        synthetic: [2] float32: drafted tokens that are accepted whatever was chosen, and the chance of one more; the
            first is negative where the choice decides.
        ints: [parameters, M] int64, as SamplingState has them.
        last_tokens: [M] int64; lengths: [M] int32; history: [M, L] int32; written for the rows of requests.
        results: [R, RESULT_FIELDS] int64, written.
    """
    num_requests, num_tokens = tokens.shape
    wrap_triton(_end_kernel)[(num_requests,)](
        tokens,
        fields,
        drafted,
        synthetic,
        ints,
        last_tokens,
        lengths,
        history,
        results,
        num_tokens,
        ints.shape[1],
        history.shape[1],
        FIELDS=VERIFY_FIELDS,
        DRAFTED=DRAFTED_FIELDS,
        RESULTS=RESULT_FIELDS,
        MOST_TOKENS=MOST_DRAFTED + 1,
        SEED=SEED,
        SYNTHETIC=SYNTHETIC,
        EARLY=starts_early(),
        num_warps=1,
    )
