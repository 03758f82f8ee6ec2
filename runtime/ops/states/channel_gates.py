"""The gated delta rule by chunks where a gate belongs to a channel of the keys (KDA: Kimi-Linear).

gated_delta.py has the equations of a chunk; here G has a number for each channel, so that, with ⊙ the product of
elements, (k_i·k_j) exp(G_i - G_j) becomes (k_i ⊙ exp(G_i))·(k_j ⊙ exp(-G_j)), whose second factor leaves the range of
float32. So the pairs of tokens i > j are taken by halves: those of which i is in the second half of a block of 64
tokens and j in the first, then the same of its two halves, and so on to blocks of two. For each, with m the last token
of the first half, exp(G_i - G_m) and exp(G_m - G_j) are both at most 1, and a product of matrices has them all. (Kimi
Linear, arXiv 2510.26692, takes such anchors by blocks of 16.)

Shape legend as in gated_delta.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.states.requests import LEAST_LOG_DECAY, SEARCHED, find_block, inverse_of, num_blocks

_CHUNK = 64  # tokens
_CHUNK_VALUES = 64
_WARPS = 8
_LEAST_SIDE = 16  # of tl.dot


@triton.jit
def _solve_channel_gates_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    starts_ptr,
    ends_ptr,
    decays_ptr,
    inverses_ptr,
    scores_ptr,
    queries_ptr,
    keys_ptr,
    left_ptr,
    kept_ptr,
    q_token_stride,
    q_head_stride,
    q_dim_stride,
    k_token_stride,
    k_head_stride,
    k_dim_stride,
    g_token_stride,
    g_head_stride,
    g_dim_stride,
    beta_token_stride,
    beta_head_stride,
    num_requests,
    GROUP: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    SCALE: tl.constexpr,
    QK_NORM: tl.constexpr,
    EPS: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    SEARCHED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (chunk of any request, value head): all of the chunk that does not depend on a state."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    block = tl.program_id(0)
    head = tl.program_id(1)
    request, index = find_block(starts_ptr, ends_ptr, num_requests, block, CHUNK, SEARCHED)
    if request < num_requests:
        places = tl.arange(0, CHUNK)
        dims = tl.arange(0, PADDED_D)[None, :]
        tokens = tl.load(starts_ptr + request).to(tl.int64) + index * CHUNK + places
        is_token = tokens < tl.load(ends_ptr + request)
        mask = is_token[:, None] & (dims < D)
        key_head = head // GROUP
        of_q = q_ptr + tokens[:, None] * q_token_stride + key_head * q_head_stride + dims * q_dim_stride
        of_k = k_ptr + tokens[:, None] * k_token_stride + key_head * k_head_stride + dims * k_dim_stride
        of_g = g_ptr + tokens[:, None] * g_token_stride + head * g_head_stride + dims * g_dim_stride
        q = tl.load(of_q, mask, 0.0).to(tl.float32)
        k = tl.load(of_k, mask, 0.0).to(tl.float32)
        g = tl.maximum(tl.load(of_g, mask, 0.0).to(tl.float32), LEAST_LOG_DECAY)
        beta = tl.load(beta_ptr + tokens * beta_token_stride + head * beta_head_stride, is_token, 0.0).to(tl.float32)
        if QK_NORM:
            q *= tl.rsqrt(tl.sum(q * q, 1) + EPS)[:, None]
            k *= tl.rsqrt(tl.sum(k * k, 1) + EPS)[:, None]
        q *= SCALE
        chunk = block.to(tl.int64) * HV + head
        decays = tl.cumsum(g, 0)
        total = tl.sum(g, 0)[None, :]
        of_decays = decays_ptr + chunk * CHUNK * PADDED_D + dims
        tl.store(of_decays + places[:, None] * PADDED_D, decays)
        tl.debug_barrier()  # rows of it are read by others than wrote them

        row = places[:, None]
        column = places[None, :]
        below = tl.zeros((CHUNK, CHUNK), tl.float32)
        scores = tl.where(row == column, tl.sum(q * k, 1)[:, None], 0.0)
        for level in range(LEVELS):
            size = 1 << level
            middle = row // (2 * size) * (2 * size) + size - 1
            at_middle = tl.load(of_decays + middle * PADDED_D)
            is_late = row // size % 2 == 1
            factors = tl.exp(tl.where(is_late, decays - at_middle, at_middle - decays))
            keys = (k * factors).to(keys_ptr.dtype.element_ty)
            queries = (q * factors).to(keys_ptr.dtype.element_ty)
            is_between = is_late & (row // size == column // size + 1)
            below += tl.where(is_between, tl.dot(keys, tl.trans(keys)), 0.0)
            scores += tl.where(is_between, tl.dot(queries, tl.trans(keys)), 0.0)
        inverse = inverse_of(below * beta[:, None], CHUNK, LEVELS, "tf32") * beta[None, :]

        square = chunk * CHUNK * CHUNK + row * CHUNK + column
        tl.store(inverses_ptr + square, inverse.to(inverses_ptr.dtype.element_ty))
        tl.store(scores_ptr + square, scores.to(scores_ptr.dtype.element_ty))
        rows = chunk * CHUNK * PADDED_D + row * PADDED_D + dims
        grown = tl.exp(decays)
        tl.store(queries_ptr + rows, (q * grown).to(queries_ptr.dtype.element_ty))
        tl.store(keys_ptr + rows, (k * grown).to(keys_ptr.dtype.element_ty))
        tl.store(left_ptr + rows, (k * tl.exp(total - decays)).to(left_ptr.dtype.element_ty))
        tl.store(kept_ptr + chunk * PADDED_D + dims, tl.exp(total))


@triton.jit
def _chunk_channel_gates_kernel(
    v_ptr,
    states_ptr,
    rows_ptr,
    has_state_ptr,
    starts_ptr,
    ends_ptr,
    inverses_ptr,
    scores_ptr,
    queries_ptr,
    keys_ptr,
    left_ptr,
    kept_ptr,
    out_ptr,
    v_token_stride,
    v_head_stride,
    v_dim_stride,
    HV: tl.constexpr,
    DV: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SEARCHED: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (block of a value head's rows, value head, request): its chunks, one after another."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    values = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    head = tl.program_id(1)
    request = tl.program_id(2)
    row = tl.load(rows_ptr + request).to(tl.int64)
    has_state = (tl.load(has_state_ptr + request) != 0) & (row > 0)
    start = tl.load(starts_ptr + request).to(tl.int64)
    end = tl.load(ends_ptr + request).to(tl.int64)
    earlier = 0  # chunks of requests ahead of this one
    for first in range(0, request, SEARCHED):
        requests = first + tl.arange(0, SEARCHED)
        starts = tl.load(starts_ptr + requests, mask=requests < request, other=0)
        ends = tl.load(ends_ptr + requests, mask=requests < request, other=0)
        earlier += tl.sum((ends - starts + CHUNK - 1) // CHUNK, 0)
    dims = tl.arange(0, PADDED_D)
    places = tl.arange(0, CHUNK)
    is_value = values < DV
    is_number = (dims < D)[:, None] & is_value
    # [D, Dv]: as products take it.
    of_state = states_ptr + ((row * HV + head) * DV + values) * D + dims[:, None]
    state = tl.load(of_state, mask=is_number & has_state, other=0.0).to(tl.float32)
    of_v = v_ptr + head * v_head_stride + values * v_dim_stride
    square = places[:, None] * CHUNK + places[None, :]
    tokens_by_dims = places[:, None] * PADDED_D + dims[None, :]
    num_chunks = ((end - start + CHUNK - 1) // CHUNK).to(tl.int32)
    for index in tl.range(0, num_chunks, num_stages=STAGES):
        tokens = (start + index * CHUNK + places)[:, None]
        is_token = tokens < end
        chunk = (earlier + index).to(tl.int64) * HV + head
        of_tokens = chunk * CHUNK * PADDED_D + tokens_by_dims
        v = tl.load(of_v + tokens * v_token_stride, is_token & is_value, 0.0)
        keys = tl.load(keys_ptr + of_tokens)
        queries = tl.load(queries_ptr + of_tokens)
        left = tl.load(left_ptr + of_tokens)
        inverse = tl.load(inverses_ptr + chunk * CHUNK * CHUNK + square)
        scores = tl.load(scores_ptr + chunk * CHUNK * CHUNK + square)
        kept = tl.load(kept_ptr + chunk * PADDED_D + dims)
        rounded = state.to(keys.dtype)
        unknown = v.to(tl.float32) - tl.dot(keys, rounded)
        added = tl.dot(inverse, unknown.to(keys.dtype)).to(keys.dtype)
        out = tl.dot(queries, rounded) + tl.dot(scores, added)
        tl.store(out_ptr + (tokens * HV + head) * DV + values, out.to(out_ptr.dtype.element_ty), is_token & is_value)
        state = state * kept[:, None] + tl.dot(tl.trans(left), added)
    tl.store(of_state, state.to(states_ptr.dtype.element_ty), is_number & (row > 0) & (end > start))


def channel_gated_delta_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: torch.Tensor,
    has_state: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    constants: dict[str, object],
    stages: int,
) -> None:
    """Prompts of gated_delta_states, with its operands, whose gates g are [T, Hv, D].

    Args:
        constants: GROUP, HV, D, SCALE, QK_NORM and EPS.
        stages: chunks that a block has in shared memory at once.
    """
    _, heads, value_width = v.shape
    padded = max(_LEAST_SIDE, triton.next_power_of_2(q.shape[2]))
    chunks = num_blocks(q, rows, _CHUNK)
    decays = torch.empty((chunks, heads, _CHUNK, padded), dtype=torch.float32, device=q.device)
    inverses = torch.empty((chunks, heads, _CHUNK, _CHUNK), dtype=q.dtype, device=q.device)
    scores = torch.empty_like(inverses)
    queries = torch.empty((chunks, heads, _CHUNK, padded), dtype=q.dtype, device=q.device)
    keys, left = torch.empty_like(queries), torch.empty_like(queries)
    kept = torch.empty((chunks, heads, padded), dtype=torch.float32, device=q.device)
    wrap_triton(_solve_channel_gates_kernel)[(chunks, heads)](
        *(q, k, g, beta, starts, ends, decays, inverses, scores, queries, keys, left, kept),
        *q.stride(),
        *k.stride(),
        *g.stride(),
        *beta.stride(),
        rows.shape[0],
        PADDED_D=padded,
        CHUNK=_CHUNK,
        LEVELS=_CHUNK.bit_length() - 1,
        SEARCHED=SEARCHED,
        EARLY=starts_early(),
        num_warps=_WARPS,
        num_stages=1,
        **constants,
    )
    block = max(_LEAST_SIDE, min(_CHUNK_VALUES, triton.next_power_of_2(value_width)))
    wrap_triton(_chunk_channel_gates_kernel)[(triton.cdiv(value_width, block), heads, rows.shape[0])](
        *(v, states, rows, has_state, starts, ends, inverses, scores, queries, keys, left, kept, out),
        *v.stride(),
        HV=heads,
        DV=value_width,
        D=q.shape[2],
        PADDED_D=padded,
        BLOCK=block,
        CHUNK=_CHUNK,
        SEARCHED=SEARCHED,
        STAGES=stages,
        EARLY=starts_early(),
        num_warps=_WARPS,
    )
