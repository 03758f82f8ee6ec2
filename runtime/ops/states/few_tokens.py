"""The gated delta rule over prompts of few tokens, as they are behind a cached prefix: one kernel, by short chunks.

Chunks of 64 tokens spend much of such a step on missing pairs of tokens, and so does the second of two kernels. Here
each block solves its chunks itself: with so few tokens that is less than to read what another has solved.

delta_chunks.py has the equations of a chunk. Imports Triton: only the kernels of this folder need it.

Shape legend as in gated_delta.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.states.delta_chunks import LEAST_SIDE, SHORT_CHUNK
from mllm_compile.runtime.ops.states.head_gates import gates_of, solve_chunk

_VALUES = 32  # of a block
_WARPS = 4


@triton.jit
def _few_tokens_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    g_ptr: tl.tensor,
    beta_ptr: tl.tensor,
    a_log_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    states_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    has_state_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    out_ptr: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    q_dim_stride: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    k_dim_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    v_dim_stride: tl.tensor,
    g_token_stride: tl.tensor,
    g_head_stride: tl.tensor,
    beta_token_stride: tl.tensor,
    beta_head_stride: tl.tensor,
    GROUP: tl.constexpr,
    HV: tl.constexpr,
    DV: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    SCALE: tl.constexpr,
    QK_NORM: tl.constexpr,
    EPS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    WAITS_FIRST: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (block of a value head's rows, value head, request): its chunks, one after another."""
    if WAITS_FIRST:
        wait_for_prerequisites()
    values = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    head = tl.program_id(1)
    request = tl.program_id(2)
    row = tl.load(rows_ptr + request).to(tl.int64)
    has_state = (tl.load(has_state_ptr + request) != 0) & (row > 0)
    source = tl.load(sources_ptr + request).to(tl.int64)
    start = tl.load(starts_ptr + request).to(tl.int64)
    end = tl.load(ends_ptr + request).to(tl.int64)
    dims = tl.arange(0, PADDED_D)
    places = tl.arange(0, CHUNK)
    is_dim = (dims < D)[None, :]
    is_value = values < DV
    is_number = (dims < D)[:, None] & is_value
    # [D, Dv]: as products take it.
    of_state = states_ptr + ((row * HV + head) * DV + values) * D + dims[:, None]
    of_source = states_ptr + ((source * HV + head) * DV + values) * D + dims[:, None]
    of_q = q_ptr + (head // GROUP) * q_head_stride + dims[None, :] * q_dim_stride
    of_k = k_ptr + (head // GROUP) * k_head_stride + dims[None, :] * k_dim_stride
    of_v = v_ptr + head * v_head_stride + values * v_dim_stride
    # A captured step has blocks for more requests than most steps have. Blocks without tokens end at once, except one,
    # so that the launch ends after the previous one.
    if end > start:
        state = tl.load(of_source, mask=is_number & has_state, other=0.0).to(tl.float32)
        rate = 0.0
        shift = 0.0
        if GATED:
            rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
            shift = tl.load(bias_ptr + head).to(tl.float32)
        if EARLY:  # states and weights are on their way: none of the kernels that run now writes them
            wait_for_prerequisites()
        for first in range(start, end, CHUNK):
            tokens = first + places
            is_token = tokens < end
            rows = tokens[:, None]
            is_row = is_token[:, None]
            q = tl.load(of_q + rows * q_token_stride, is_row & is_dim, 0.0)
            k = tl.load(of_k + rows * k_token_stride, is_row & is_dim, 0.0)
            v = tl.load(of_v + rows * v_token_stride, is_row & is_value, 0.0)
            g = tl.load(g_ptr + tokens * g_token_stride + head * g_head_stride, is_token, 0.0)
            beta = tl.load(beta_ptr + tokens * beta_token_stride + head * beta_head_stride, is_token, 0.0)
            if EARLY:  # not before: what the next kernel reads ahead would be in the way
                start_dependents()
            g, beta = gates_of(g, beta, is_token, rate, shift, GATED)
            inverse, scores, of_known, of_out, of_added, kept = solve_chunk(
                q, k, g, beta, SCALE, QK_NORM, EPS, CHUNK, LEVELS
            )
            rounded = state.to(k.dtype)
            known = tl.dot(k, rounded) * of_known[:, None]
            added = tl.dot(inverse.to(k.dtype), (v.to(tl.float32) - known).to(k.dtype))
            out = tl.dot(q, rounded) * of_out[:, None] + tl.dot(scores.to(k.dtype), added.to(k.dtype))
            tl.store(out_ptr + (rows * HV + head) * DV + values, out.to(out_ptr.dtype.element_ty), is_row & is_value)
            state = state * kept + tl.dot(tl.trans(k), (added * of_added[:, None]).to(k.dtype))
        tl.store(of_state, state.to(states_ptr.dtype.element_ty), is_number & (row > 0))
    elif EARLY:  # noqa: SIM102 # the one is known when the kernel is compiled
        if (request == 0) & (head == 0) & (tl.program_id(0) == 0):
            wait_for_prerequisites()


def multiply_few_tokens(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    states: torch.Tensor,
    rows: torch.Tensor,
    has_state: torch.Tensor,
    sources: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    constants: dict[str, object],
    waits_first: bool,
) -> None:
    """Takes states and outputs of prompts through their chunks.

    Args:
        q, k, v, g, beta, A_log, dt_bias, states, rows, has_state, sources, starts, ends, out: as gated_delta_states has
            them, g [T, Hv].
        constants: GROUP, HV, D, SCALE, QK_NORM and EPS.
        waits_first: as gated_delta_states has it.
    """
    heads, width = v.shape[1:]
    block = max(LEAST_SIDE, min(_VALUES, triton.next_power_of_2(width)))
    gates = (beta if A_log is None else A_log, beta if dt_bias is None else dt_bias)  # which are not read without
    wrap_triton(_few_tokens_kernel)[(triton.cdiv(width, block), heads, rows.shape[0])](
        *(q, k, v, g, beta, *gates, states, rows, has_state, sources, starts, ends, out),
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *g.stride(),
        *beta.stride(),
        DV=width,
        PADDED_D=max(LEAST_SIDE, triton.next_power_of_2(q.shape[2])),
        GATED=A_log is not None,
        BLOCK=block,
        CHUNK=SHORT_CHUNK,
        LEVELS=SHORT_CHUNK.bit_length() - 1,
        WAITS_FIRST=waits_first and starts_early(),
        EARLY=starts_early(),
        num_warps=_WARPS,
        num_stages=1,
        **constants,
    )
