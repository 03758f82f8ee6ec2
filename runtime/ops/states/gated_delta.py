"""The gated delta rule over the states of requests: token by token in registers, or a chunk of tokens by products.

Triton by hand, as `torch.library.triton_op`, so that AOTInductor puts the compiled kernel into a package
(mllm_compile/kernels/states.py). Only the piece compiler imports this module.

delta_chunks.py has the equations of a chunk.

Shape legend: T tokens, B requests, Hk key heads, Hv value heads, D key width, Dv value width, R rows of the pool.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.states.channel_gates import solve_channel_gates
from mllm_compile.runtime.ops.states.delta_chunks import CHUNK, SHORT_CHUNK, multiply_chunks
from mllm_compile.runtime.ops.states.few_tokens import multiply_few_tokens
from mllm_compile.runtime.ops.states.gated_norm import norm_outputs
from mllm_compile.runtime.ops.states.head_gates import solve_head_gates
from mllm_compile.runtime.ops.states.requests import NORM_EPS, sigmoid, softplus

_STEP_VALUES = 16  # of a block: 8 KB of a state with keys of 128 in float32
_STEP_WARPS = 4
# Products of 16 bits take keys as they came, and round a state to 16 bits for them; float32 would take several each.
_CHUNKED_DTYPES = (torch.bfloat16, torch.float16)
_MOST_CHUNK_KEYS = 128  # wider keys' chunks do not stay in registers


@triton.jit
def _load_token(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    g_ptr: tl.tensor,
    beta_ptr: tl.tensor,
    is_token: tl.tensor,
    dims: tl.tensor,
    is_dim: tl.tensor,
    values: tl.tensor,
    is_value: tl.tensor,
    q_dim_stride: tl.tensor,
    k_dim_stride: tl.tensor,
    v_dim_stride: tl.tensor,
    g_dim_stride: tl.tensor,
    GATE_A_CHANNEL: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """q, k, v, g and beta of a token, whose heads the pointers point to."""
    q = tl.load(q_ptr + dims * q_dim_stride, is_dim & is_token, 0.0)
    k = tl.load(k_ptr + dims * k_dim_stride, is_dim & is_token, 0.0)
    v = tl.load(v_ptr + values * v_dim_stride, is_value & is_token, 0.0)
    if GATE_A_CHANNEL:
        g = tl.load(g_ptr + dims * g_dim_stride, is_dim & is_token, 0.0)
    else:
        g = tl.load(g_ptr, is_token, 0.0)
    return q, k, v, g, tl.load(beta_ptr, is_token, 0.0)


@triton.jit
def _step_gated_delta_kernel(
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
    g_dim_stride: tl.tensor,
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
    GATE_A_CHANNEL: tl.constexpr,
    BLOCK: tl.constexpr,
    DECODES: tl.constexpr,
    WAITS_FIRST: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (block of a value head's rows, value head, request): its part of the state stays in registers."""
    if WAITS_FIRST:
        wait_for_prerequisites()
    values = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    request = tl.program_id(2)
    row = tl.load(rows_ptr + request).to(tl.int64)
    has_state = (tl.load(has_state_ptr + request) != 0) & (row > 0)
    if DECODES:
        source = row
        start = request.to(tl.int64)
        end = start + 1
    else:
        source = tl.load(sources_ptr + request).to(tl.int64)
        start = tl.load(starts_ptr + request).to(tl.int64)
        end = tl.load(ends_ptr + request).to(tl.int64)
    dims = tl.arange(0, PADDED_D)
    is_dim = dims < D
    is_value = values < DV
    is_number = is_value[:, None] & is_dim[None, :]
    of_source = states_ptr + ((source * HV + head) * DV + values[:, None]) * D + dims[None, :]
    state = tl.load(of_source, mask=is_number & has_state, other=0.0).to(tl.float32)
    q_ptr += (head // GROUP) * q_head_stride
    k_ptr += (head // GROUP) * k_head_stride
    v_ptr += head * v_head_stride
    g_ptr += head * g_head_stride
    beta_ptr += head * beta_head_stride
    rate = 0.0
    shift = 0.0
    if GATED:
        rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
        shift = tl.load(bias_ptr + head).to(tl.float32)
    if EARLY:  # states and weights are on their way: none of the kernels that run now writes them
        wait_for_prerequisites()
    next_q, next_k, next_v, next_g, next_beta = _load_token(
        q_ptr + start * q_token_stride,
        k_ptr + start * k_token_stride,
        v_ptr + start * v_token_stride,
        g_ptr + start * g_token_stride,
        beta_ptr + start * beta_token_stride,
        *(start < end, dims, is_dim, values, is_value),
        *(q_dim_stride, k_dim_stride, v_dim_stride, g_dim_stride, GATE_A_CHANNEL),
    )
    if EARLY:  # not before: what the next kernel reads ahead would be in the way
        start_dependents()
    for token in range(start, end):
        q = next_q.to(tl.float32)
        k = next_k.to(tl.float32)
        v = next_v.to(tl.float32)
        g = next_g.to(tl.float32)
        beta = next_beta.to(tl.float32)
        if GATED:
            g = rate * softplus(g + shift)
            beta = sigmoid(beta)
        decay = tl.exp(g)
        if not DECODES:  # on its way while this token is computed
            following = token + 1
            next_q, next_k, next_v, next_g, next_beta = _load_token(
                q_ptr + following * q_token_stride,
                k_ptr + following * k_token_stride,
                v_ptr + following * v_token_stride,
                g_ptr + following * g_token_stride,
                beta_ptr + following * beta_token_stride,
                *(following < end, dims, is_dim, values, is_value),
                *(q_dim_stride, k_dim_stride, v_dim_stride, g_dim_stride, GATE_A_CHANNEL),
            )
        if QK_NORM:
            q *= tl.rsqrt(tl.sum(q * q, 0) + EPS)
            k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
        if GATE_A_CHANNEL:
            state *= decay[None, :]
        else:
            state *= decay
        known = tl.sum(state * k[None, :], 1)
        state += ((v - known) * beta)[:, None] * k[None, :]
        out = tl.sum(state * (q * SCALE)[None, :], 1)
        tl.store(out_ptr + (token * HV + head) * DV + values, out.to(out_ptr.dtype.element_ty), is_value)
        state = state.to(states_ptr.dtype.element_ty).to(tl.float32)  # as where the next token is in another step
    # Read again, so that addresses take no registers in between: a sixth block has room on a multiprocessor.
    row = tl.load(rows_ptr + request).to(tl.int64)
    places = states_ptr + ((row * HV + head) * DV + values[:, None]) * D + dims[None, :]
    tl.store(places, state.to(states_ptr.dtype.element_ty), is_number & (row > 0) & (end > start))


@triton_op("mllm::gated_delta_states", mutates_args={"states", "out"})
def gated_delta_states(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    z: torch.Tensor | None,
    norm: torch.Tensor | None,
    states: torch.Tensor,
    rows: torch.Tensor,
    has_state: torch.Tensor,
    sources: torch.Tensor | None,
    starts: torch.Tensor | None,
    ends: torch.Tensor | None,
    out: torch.Tensor,
    qk_l2norm: bool,
    norm_eps: float = 0.0,
    norm_gate: str = "",
    by_token: bool = False,
    few_tokens: bool = False,
    waits_first: bool = False,
) -> None:
    """runtime/state/layer.py's GatedDelta. Prompts of 16 bits go by chunks, in two kernels; those with a gate a channel
    by channel_gates.py's, few tokens of others by few_tokens.py's one. A norm is one more kernel.

    Args:
        q, k: [T, Hk, D]; v: [T, Hv, Dv]; g: [T, Hv] or [T, Hv, D]; beta: [T, Hv]; of any strides.
        A_log, dt_bias: [Hv], contiguous, with g [T, Hv] alone; none: g and beta are what they stand for.
        z: [T, Hv, Dv], of any strides; norm: [Dv], contiguous; none: outputs are not normed.
        states: [R, Hv, Dv, D], contiguous, written at `rows`.
        rows: [B] int64; has_state: [B] bool.
        sources: [B] int64, the rows where states are read; none: `rows`. Requests with `starts` alone may have others.
        starts, ends: [B] int32, each request's tokens; none: request i has token i alone.
        out: [T, Hv, Dv], contiguous, written for requests' tokens.
        qk_l2norm: q and k are divided by their norms.
        norm_eps, norm_gate: of the norm behind, and of z.
        by_token: prompts go token by token, so that a token's numbers do not depend on where a prompt was cut.
        few_tokens: chunks are short.
        waits_first: a kernel ahead makes what no token has a part in, weights in another type say: nothing is read
            before it has ended.
    """
    _compute(
        *(q, k, v, g, beta, A_log, dt_bias, states, rows, has_state, sources, starts, ends, out),
        qk_l2norm=qk_l2norm,
        by_token=by_token,
        few_tokens=few_tokens,
        waits_first=waits_first,
    )
    if z is not None and norm is not None:
        norm_outputs(out, z, norm, rows, starts, ends, norm_eps, norm_gate, few_tokens)


def _compute(
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
    sources: torch.Tensor | None,
    starts: torch.Tensor | None,
    ends: torch.Tensor | None,
    out: torch.Tensor,
    *,
    qk_l2norm: bool,
    by_token: bool,
    few_tokens: bool,
    waits_first: bool,
) -> None:
    """gated_delta_states without the norm."""
    _, key_heads, width = q.shape
    _, heads, value_width = v.shape
    sizes = {"GROUP": heads // key_heads, "HV": heads, "D": width}
    norms = {"SCALE": width**-0.5, "QK_NORM": qk_l2norm, "EPS": NORM_EPS}
    gate_a_channel = g.dim() == 3
    padded = triton.next_power_of_2(width)
    is_chunked = padded <= _MOST_CHUNK_KEYS and q.dtype in _CHUNKED_DTYPES and q.dtype == v.dtype
    if starts is not None and ends is not None and is_chunked and not by_token:
        of_requests = (states, rows, has_state, rows if sources is None else sources, starts, ends, out)
        if gate_a_channel:
            chunk = SHORT_CHUNK if few_tokens else CHUNK
            solved = solve_channel_gates(q, k, g, beta, starts, ends, {**sizes, **norms}, chunk)
            multiply_chunks(solved, v, *of_requests, sizes, gate_a_channel, chunk)
        elif few_tokens:
            multiply_few_tokens(q, k, v, g, beta, A_log, dt_bias, *of_requests, {**sizes, **norms}, waits_first)
        else:
            solved = solve_head_gates(q, k, g, beta, A_log, dt_bias, starts, ends, {**sizes, **norms})
            multiply_chunks(solved, v, *of_requests, sizes, gate_a_channel, CHUNK)
        return
    block = min(_STEP_VALUES, triton.next_power_of_2(value_width))
    wrap_triton(_step_gated_delta_kernel)[(triton.cdiv(value_width, block), heads, rows.shape[0])](
        *(q, k, v, g, beta),
        beta if A_log is None else A_log,  # which, as those below, are not read without
        beta if dt_bias is None else dt_bias,
        *(states, rows, has_state),
        rows if sources is None else sources,
        rows if starts is None else starts,
        rows if ends is None else ends,
        out,
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *g.stride(),
        *(() if gate_a_channel else (0,)),
        *beta.stride(),
        DV=value_width,
        PADDED_D=padded,
        GATED=A_log is not None,
        GATE_A_CHANNEL=gate_a_channel,
        BLOCK=block,
        DECODES=starts is None or ends is None,
        WAITS_FIRST=waits_first and starts_early(),
        EARLY=starts_early(),
        num_warps=_STEP_WARPS,
        **sizes,
        **norms,
    )
