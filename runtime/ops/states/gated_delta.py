"""The gated delta rule over the states of requests: token by token in registers, or a chunk of tokens by products.

Triton by hand, as `torch.library.triton_op`, so that AOTInductor puts the compiled kernel into a package
(mllm_compile/kernels/states.py). Only the piece compiler imports this module.

Within a chunk the rule is a triangular system of equations ("WY form": Yang et al. 2024, arXiv 2406.06484; with gates
arXiv 2412.06464). With G the sum of a chunk's logarithms of decays up to a token, and S the state before it,

    u_i = beta_i (v_i - exp(G_i) S k_i - sum over j < i of exp(G_i - G_j) (k_i·k_j) u_j)
    out_i = exp(G_i) S q_i + sum over j <= i of exp(G_i - G_j) (q_i·k_j) u_j
    S <- exp(G_last) S + sum over j of exp(G_last - G_j) u_j k_jᵀ

Shape legend: T tokens, B requests, Hk key heads, Hv value heads, D key width, Dv value width, R rows of the pool.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.shared_memory import most_shared_bytes
from mllm_compile.runtime.ops.states.channel_gates import channel_gated_delta_chunks
from mllm_compile.runtime.ops.states.gated_norm import norm_outputs
from mllm_compile.runtime.ops.states.requests import (
    LEAST_LOG_DECAY,
    NORM_EPS,
    SEARCHED,
    find_block,
    inverse_of,
    num_blocks,
    sigmoid,
    softplus,
)

_STEP_VALUES = 32  # of a block: 16 KB of a state with keys of 128 in float32
_CHUNK_VALUES = 64
_CHUNK_WARPS = 8
_TWO_STAGES_BYTES = 160 << 10  # of shared memory, so that a chunk can arrive while one is computed
_CHUNK = 64  # tokens
# Products of 16 bits take keys as they came, and round a state to 16 bits for them; float32 would take several each.
_CHUNKED_DTYPES = (torch.bfloat16, torch.float16)
_LEAST_SIDE = 16  # of tl.dot
_MOST_CHUNK_KEYS = 128  # wider keys' chunks do not stay in registers


@triton.jit
def _load_token(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    is_token,
    dims,
    is_dim,
    values,
    is_value,
    q_dim_stride,
    k_dim_stride,
    v_dim_stride,
    g_dim_stride,
    GATE_A_CHANNEL: tl.constexpr,
):
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
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    a_log_ptr,
    bias_ptr,
    states_ptr,
    rows_ptr,
    has_state_ptr,
    starts_ptr,
    ends_ptr,
    out_ptr,
    q_token_stride,
    q_head_stride,
    q_dim_stride,
    k_token_stride,
    k_head_stride,
    k_dim_stride,
    v_token_stride,
    v_head_stride,
    v_dim_stride,
    g_token_stride,
    g_head_stride,
    g_dim_stride,
    beta_token_stride,
    beta_head_stride,
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
    EARLY: tl.constexpr,
):
    """Program (block of a value head's rows, value head, request): its part of the state stays in registers."""
    values = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    request = tl.program_id(2)
    row = tl.load(rows_ptr + request).to(tl.int64)
    has_state = (tl.load(has_state_ptr + request) != 0) & (row > 0)
    if DECODES:
        start = request.to(tl.int64)
        end = start + 1
    else:
        start = tl.load(starts_ptr + request).to(tl.int64)
        end = tl.load(ends_ptr + request).to(tl.int64)
    dims = tl.arange(0, PADDED_D)
    is_dim = dims < D
    is_value = values < DV
    is_number = is_value[:, None] & is_dim[None, :]
    places = states_ptr + ((row * HV + head) * DV + values[:, None]) * D + dims[None, :]
    state = tl.load(places, mask=is_number & has_state, other=0.0).to(tl.float32)
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
        start_dependents()
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
        following = token + 1  # on its way while this token is computed
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
    tl.store(places, state.to(states_ptr.dtype.element_ty), is_number & (row > 0) & (end > start))


@triton.jit
def _solve_gated_delta_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    a_log_ptr,
    bias_ptr,
    starts_ptr,
    ends_ptr,
    inverses_ptr,
    scores_ptr,
    factors_ptr,
    q_token_stride,
    q_head_stride,
    q_dim_stride,
    k_token_stride,
    k_head_stride,
    k_dim_stride,
    g_token_stride,
    g_head_stride,
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
    GATED: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    SEARCHED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (chunk of any request, value head): all of the chunk that does not depend on a state.

    Products take keys and queries as they came; their norms are factors of rows.
    """
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
        g = tl.load(g_ptr + tokens * g_token_stride + head * g_head_stride, is_token, 0.0).to(tl.float32)
        beta = tl.load(beta_ptr + tokens * beta_token_stride + head * beta_head_stride, is_token, 0.0).to(tl.float32)
        if GATED:
            g = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32)) * softplus(
                g + tl.load(bias_ptr + head).to(tl.float32)
            )
            g = tl.where(is_token, g, 0.0)
            beta = tl.where(is_token, sigmoid(beta), 0.0)
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
        chunk = block.to(tl.int64) * HV + head
        square = chunk * CHUNK * CHUNK + places[:, None] * CHUNK + places[None, :]
        tl.store(inverses_ptr + square, inverse.to(inverses_ptr.dtype.element_ty))
        tl.store(scores_ptr + square, scores.to(scores_ptr.dtype.element_ty))
        factors = factors_ptr + chunk * 4 * CHUNK + places
        tl.store(factors, of_k * tl.exp(decays))
        tl.store(factors + CHUNK, of_q * tl.exp(decays))
        tl.store(factors + 2 * CHUNK, of_k * tl.exp(total - decays))
        tl.store(factors + 3 * CHUNK, tl.exp(total) + tl.zeros((CHUNK,), tl.float32))


@triton.jit
def _chunk_gated_delta_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    states_ptr,
    rows_ptr,
    has_state_ptr,
    starts_ptr,
    ends_ptr,
    inverses_ptr,
    scores_ptr,
    factors_ptr,
    out_ptr,
    q_token_stride,
    q_head_stride,
    q_dim_stride,
    k_token_stride,
    k_head_stride,
    k_dim_stride,
    v_token_stride,
    v_head_stride,
    v_dim_stride,
    GROUP: tl.constexpr,
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
    is_dim = (dims < D)[None, :]
    is_value = values < DV
    is_number = (dims < D)[:, None] & is_value
    # [D, Dv]: as products take it.
    of_state = states_ptr + ((row * HV + head) * DV + values) * D + dims[:, None]
    state = tl.load(of_state, mask=is_number & has_state, other=0.0).to(tl.float32)
    of_q = q_ptr + (head // GROUP) * q_head_stride + dims[None, :] * q_dim_stride
    of_k = k_ptr + (head // GROUP) * k_head_stride + dims[None, :] * k_dim_stride
    of_v = v_ptr + head * v_head_stride + values * v_dim_stride
    square = places[:, None] * CHUNK + places[None, :]
    num_chunks = ((end - start + CHUNK - 1) // CHUNK).to(tl.int32)
    for index in tl.range(0, num_chunks, num_stages=STAGES):
        tokens = (start + index * CHUNK + places)[:, None]
        is_token = tokens < end
        chunk = (earlier + index).to(tl.int64) * HV + head
        k = tl.load(of_k + tokens * k_token_stride, is_token & is_dim, 0.0)
        v = tl.load(of_v + tokens * v_token_stride, is_token & is_value, 0.0)
        q = tl.load(of_q + tokens * q_token_stride, is_token & is_dim, 0.0)
        inverse = tl.load(inverses_ptr + chunk * CHUNK * CHUNK + square)
        scores = tl.load(scores_ptr + chunk * CHUNK * CHUNK + square)
        factors = factors_ptr + chunk * 4 * CHUNK + places
        rounded = state.to(k.dtype)
        unknown = v.to(tl.float32) - tl.load(factors)[:, None] * tl.dot(k, rounded)
        added = tl.dot(inverse, unknown.to(k.dtype))
        out = tl.load(factors + CHUNK)[:, None] * tl.dot(q, rounded) + tl.dot(scores, added.to(k.dtype))
        tl.store(out_ptr + (tokens * HV + head) * DV + values, out.to(out_ptr.dtype.element_ty), is_token & is_value)
        left = (added * tl.load(factors + 2 * CHUNK)[:, None]).to(k.dtype)
        kept = tl.load(factors_ptr + chunk * 4 * CHUNK + 3 * CHUNK)
        state = state * kept + tl.dot(tl.trans(k), left)
    tl.store(of_state, state.to(states_ptr.dtype.element_ty), is_number & (row > 0) & (end > start))


def _num_stages() -> int:
    """Chunks that a block has in shared memory at once."""
    return 2 if torch.cuda.is_available() and most_shared_bytes() >= _TWO_STAGES_BYTES else 1


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
    starts: torch.Tensor | None,
    ends: torch.Tensor | None,
    out: torch.Tensor,
    qk_l2norm: bool,
    norm_eps: float = 0.0,
    norm_gate: str = "",
    by_token: bool = False,
) -> None:
    """runtime/state/layer.py's GatedDelta. Prompts of 16 bits go by chunks, in two kernels; those with a gate a channel
    by channel_gates.py's. A norm is one more kernel.

    Args:
        q, k: [T, Hk, D]; v: [T, Hv, Dv]; g: [T, Hv] or [T, Hv, D]; beta: [T, Hv]; of any strides.
        A_log, dt_bias: [Hv], contiguous, with g [T, Hv] alone; none: g and beta are what they stand for.
        z: [T, Hv, Dv], of any strides; norm: [Dv], contiguous; none: outputs are not normed.
        states: [R, Hv, Dv, D], contiguous, read and written at `rows`.
        rows: [B] int64; has_state: [B] bool.
        starts, ends: [B] int32, each request's tokens; none: request i has token i alone.
        out: [T, Hv, Dv], contiguous, written for requests' tokens.
        qk_l2norm: q and k are divided by their norms.
        norm_eps, norm_gate: of the norm behind, and of z.
        by_token: prompts go token by token, so that a token's numbers do not depend on where a prompt was cut.
    """
    _compute(
        *(q, k, v, g, beta, A_log, dt_bias, states, rows, has_state, starts, ends, out),
        qk_l2norm=qk_l2norm,
        by_token=by_token,
    )
    if z is not None and norm is not None:
        norm_outputs(out, z, norm, rows, starts, ends, norm_eps, norm_gate)


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
    starts: torch.Tensor | None,
    ends: torch.Tensor | None,
    out: torch.Tensor,
    *,
    qk_l2norm: bool,
    by_token: bool,
) -> None:
    """gated_delta_states without the norm."""
    _, key_heads, width = q.shape
    _, heads, value_width = v.shape
    is_decode = starts is None or ends is None
    sizes = {"GROUP": heads // key_heads, "HV": heads, "D": width, "EARLY": starts_early()}
    of_values = {"DV": value_width}
    norms = {"SCALE": width**-0.5, "QK_NORM": qk_l2norm, "EPS": NORM_EPS}
    gates = (beta if A_log is None else A_log, beta if dt_bias is None else dt_bias)  # which are not read without
    padded = triton.next_power_of_2(width)
    is_chunked = padded <= _MOST_CHUNK_KEYS and q.dtype in _CHUNKED_DTYPES and q.dtype == v.dtype
    is_chunked = is_chunked and not by_token
    if starts is None or ends is None or not is_chunked:
        block = min(_STEP_VALUES, triton.next_power_of_2(value_width))
        wrap_triton(_step_gated_delta_kernel)[(triton.cdiv(value_width, block), heads, rows.shape[0])](
            *(q, k, v, g, beta, *gates, states, rows, has_state),
            rows if starts is None else starts,  # which are not read without
            rows if ends is None else ends,
            out,
            *q.stride(),
            *k.stride(),
            *v.stride(),
            *g.stride(),
            *(() if g.dim() == 3 else (0,)),
            *beta.stride(),
            PADDED_D=padded,
            GATED=A_log is not None,
            GATE_A_CHANNEL=g.dim() == 3,
            BLOCK=block,
            DECODES=is_decode,
            num_warps=4,
            **sizes,
            **of_values,
            **norms,
        )
        return
    if g.dim() == 3:
        del sizes["EARLY"]
        channel_gated_delta_chunks(
            q, k, v, g, beta, states, rows, has_state, starts, ends, out, {**sizes, **norms}, _num_stages()
        )
        return
    padded = max(_LEAST_SIDE, padded)
    chunks = num_blocks(q, rows, _CHUNK)
    inverses = torch.empty((chunks, heads, _CHUNK, _CHUNK), dtype=q.dtype, device=q.device)
    scores = torch.empty_like(inverses)
    factors = torch.empty((chunks, heads, 4, _CHUNK), dtype=torch.float32, device=q.device)
    wrap_triton(_solve_gated_delta_kernel)[(chunks, heads)](
        *(q, k, g, beta, *gates, starts, ends, inverses, scores, factors),
        *q.stride(),
        *k.stride(),
        *g.stride(),
        *beta.stride(),
        rows.shape[0],
        PADDED_D=padded,
        GATED=A_log is not None,
        CHUNK=_CHUNK,
        LEVELS=_CHUNK.bit_length() - 1,
        SEARCHED=SEARCHED,
        num_warps=4,
        num_stages=1,
        **sizes,
        **norms,
    )
    block = max(_LEAST_SIDE, min(_CHUNK_VALUES, triton.next_power_of_2(value_width)))
    wrap_triton(_chunk_gated_delta_kernel)[(triton.cdiv(value_width, block), heads, rows.shape[0])](
        *(q, k, v, states, rows, has_state, starts, ends, inverses, scores, factors, out),
        *q.stride(),
        *k.stride(),
        *v.stride(),
        PADDED_D=padded,
        BLOCK=block,
        CHUNK=_CHUNK,
        SEARCHED=SEARCHED,
        STAGES=_num_stages(),
        num_warps=_CHUNK_WARPS,
        **sizes,
        **of_values,
    )
