"""Solves the chunks of a gated delta rule where a gate belongs to a head, and so is a factor of products.

delta_chunks.py has the equations of a chunk.

Shape legend as in delta_chunks.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.states.delta_chunks import CHUNK, LEAST_SIDE, Solved
from mllm_compile.runtime.ops.states.requests import (
    LEAST_LOG_DECAY,
    SEARCHED,
    find_block,
    inverse_of,
    num_blocks,
    sigmoid,
    softplus,
)

_WARPS = 4


@triton.jit
def gates_of(
    g: tl.tensor, beta: tl.tensor, is_token: tl.tensor, rate: tl.tensor, shift: tl.tensor, GATED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Logarithms of decays, and factors, from g and beta of a chunk's tokens; 0 behind the last."""
    g = g.to(tl.float32)
    beta = beta.to(tl.float32)
    if GATED:
        g = tl.where(is_token, rate * softplus(g + shift), 0.0)
        beta = tl.where(is_token, sigmoid(beta), 0.0)
    return g, beta


@triton.jit
def solve_chunk(
    q: tl.tensor,
    k: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    SCALE: tl.constexpr,
    QK_NORM: tl.constexpr,
    EPS: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """All of a chunk that does not depend on a state: (inverse, scores, then what S k, S q, u and S are multiplied by).

    Products take keys and queries as they came [CHUNK, D]; their norms are factors of rows.
    """
    places = tl.arange(0, CHUNK)
    of_q = tl.full((CHUNK,), SCALE, tl.float32)
    of_k = tl.full((CHUNK,), 1.0, tl.float32)
    if QK_NORM:
        of_q *= tl.rsqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1) + EPS)
        of_k *= tl.rsqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), 1) + EPS)
    g = tl.maximum(g, LEAST_LOG_DECAY)
    decays = tl.cumsum(g, 0)
    total = tl.sum(g, 0)
    is_seen = places[:, None] >= places[None, :]
    # Differences of tokens that are not seen are positive: their exponentials might be infinite.
    between = tl.exp(tl.where(is_seen, decays[:, None] - decays[None, :], 0.0)) * of_k[None, :]
    keys = tl.trans(k)
    below = tl.dot(k, keys) * between * (beta * of_k)[:, None]
    below = tl.where(places[:, None] > places[None, :], below, 0.0)
    inverse = inverse_of(below, CHUNK, LEVELS, "tf32") * beta[None, :]
    scores = tl.where(is_seen, tl.dot(q, keys) * between * of_q[:, None], 0.0)
    return inverse, scores, of_k * tl.exp(decays), of_q * tl.exp(decays), of_k * tl.exp(total - decays), tl.exp(total)


@triton.jit
def _solve_head_gates_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    g_ptr: tl.tensor,
    beta_ptr: tl.tensor,
    a_log_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    inverses_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    q_dim_stride: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    k_dim_stride: tl.tensor,
    g_token_stride: tl.tensor,
    g_head_stride: tl.tensor,
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
    GATED: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    SEARCHED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (chunk of any request, value head): solve_chunk's."""
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
        q = tl.load(
            q_ptr + tokens[:, None] * q_token_stride + key_head * q_head_stride + dims * q_dim_stride, mask, 0.0
        )
        k = tl.load(
            k_ptr + tokens[:, None] * k_token_stride + key_head * k_head_stride + dims * k_dim_stride, mask, 0.0
        )
        g = tl.load(g_ptr + tokens * g_token_stride + head * g_head_stride, is_token, 0.0)
        beta = tl.load(beta_ptr + tokens * beta_token_stride + head * beta_head_stride, is_token, 0.0)
        rate = 0.0
        shift = 0.0
        if GATED:
            rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
            shift = tl.load(bias_ptr + head).to(tl.float32)
        g, beta = gates_of(g, beta, is_token, rate, shift, GATED)
        inverse, scores, of_known, of_out, of_added, kept = solve_chunk(
            q, k, g, beta, SCALE, QK_NORM, EPS, CHUNK, LEVELS
        )
        chunk = block.to(tl.int64) * HV + head
        square = chunk * CHUNK * CHUNK + places[:, None] * CHUNK + places[None, :]
        tl.store(inverses_ptr + square, inverse.to(inverses_ptr.dtype.element_ty))
        tl.store(scores_ptr + square, scores.to(scores_ptr.dtype.element_ty))
        factors = factors_ptr + chunk * 4 * CHUNK + places
        tl.store(factors, of_known)
        tl.store(factors + CHUNK, of_out)
        tl.store(factors + 2 * CHUNK, of_added)
        tl.store(factors + 3 * CHUNK, kept + tl.zeros((CHUNK,), tl.float32))


def solve_head_gates(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    starts: torch.Tensor,
    ends: torch.Tensor,
    constants: dict[str, object],
) -> Solved:
    """Solves all chunks.

    Args:
        q, k, g, beta, A_log, dt_bias, starts, ends: as gated_delta_states has them, g [T, Hv].
        constants: GROUP, HV, D, SCALE, QK_NORM and EPS.
    """
    heads, requests = g.shape[1], starts.shape[0]
    chunks = num_blocks(q, starts, CHUNK)
    inverses = torch.empty((chunks, heads, CHUNK, CHUNK), dtype=q.dtype, device=q.device)
    scores = torch.empty_like(inverses)
    factors = torch.empty((chunks, heads, 4, CHUNK), dtype=torch.float32, device=q.device)
    gates = (beta if A_log is None else A_log, beta if dt_bias is None else dt_bias)  # which are not read without
    wrap_triton(_solve_head_gates_kernel)[(chunks, heads)](
        *(q, k, g, beta, *gates, starts, ends, inverses, scores, factors),
        *q.stride(),
        *k.stride(),
        *g.stride(),
        *beta.stride(),
        requests,
        PADDED_D=max(LEAST_SIDE, triton.next_power_of_2(q.shape[2])),
        GATED=A_log is not None,
        CHUNK=CHUNK,
        LEVELS=CHUNK.bit_length() - 1,
        SEARCHED=SEARCHED,
        EARLY=starts_early(),
        num_warps=_WARPS,
        num_stages=1,
        **constants,
    )
    return Solved(q, k, inverses, scores, k, factors)
