"""Solves the chunks of a gated delta rule where a gate belongs to a channel of the keys (KDA: Kimi-Linear).

delta_chunks.py has the equations of a chunk. Here G has a number for each channel. With ⊙ the product of elements,
(k_i·k_j) exp(G_i - G_j) becomes (k_i ⊙ exp(G_i))·(k_j ⊙ exp(-G_j)), whose second factor leaves the range of float32. So
the pairs of tokens i > j are taken by halves: first pairs with i in the second half of a block of 64 tokens and j in
the first, then the same of its two halves, and so on to blocks of two. For each, with m the last token of the first
half, exp(G_i - G_m) and exp(G_m - G_j) are both at most 1, and a product of matrices has them all. (Kimi Linear, arXiv
2510.26692, takes such anchors by blocks of 16.)

Shape legend as in delta_chunks.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.states.delta_chunks import LEAST_SIDE, Solved
from mllm_compile.runtime.ops.states.requests import LEAST_LOG_DECAY, SEARCHED, find_block, inverse_of, num_blocks

_WARPS = 8


@triton.jit
def _solve_channel_gates_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    g_ptr: tl.tensor,
    beta_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    decays_ptr: tl.tensor,
    inverses_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    queries_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    left_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    q_dim_stride: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    k_dim_stride: tl.tensor,
    g_token_stride: tl.tensor,
    g_head_stride: tl.tensor,
    g_dim_stride: tl.tensor,
    beta_token_stride: tl.tensor,
    beta_head_stride: tl.tensor,
    num_requests: tl.tensor,
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
) -> None:
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


def solve_channel_gates(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    constants: dict[str, object],
    chunk: int,
) -> Solved:
    """Solves all chunks.

    Args:
        q, k, g, beta, starts, ends: as gated_delta_states has them, g [T, Hv, D].
        constants: GROUP, HV, D, SCALE, QK_NORM and EPS.
        chunk: tokens of one.
    """
    heads, requests = g.shape[1], starts.shape[0]
    padded = max(LEAST_SIDE, triton.next_power_of_2(q.shape[2]))
    chunks = num_blocks(q, starts, chunk)
    decays = torch.empty((chunks, heads, chunk, padded), dtype=torch.float32, device=q.device)
    inverses = torch.empty((chunks, heads, chunk, chunk), dtype=q.dtype, device=q.device)
    scores = torch.empty_like(inverses)
    queries = torch.empty((chunks, heads, chunk, padded), dtype=q.dtype, device=q.device)
    keys, left = torch.empty_like(queries), torch.empty_like(queries)
    kept = torch.empty((chunks, heads, padded), dtype=torch.float32, device=q.device)
    wrap_triton(_solve_channel_gates_kernel)[(chunks, heads)](
        *(q, k, g, beta, starts, ends, decays, inverses, scores, queries, keys, left, kept),
        *q.stride(),
        *k.stride(),
        *g.stride(),
        *beta.stride(),
        requests,
        PADDED_D=padded,
        CHUNK=chunk,
        LEVELS=chunk.bit_length() - 1,
        SEARCHED=SEARCHED,
        EARLY=starts_early(),
        num_warps=_WARPS,
        num_stages=1,
        **constants,
    )
    return Solved(queries, keys, inverses, scores, left, kept)
