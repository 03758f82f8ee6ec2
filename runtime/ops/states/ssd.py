"""Mamba-2's scan over the states of requests: token by token in registers, or a chunk of tokens by products.

Triton by hand, as `torch.library.triton_op`, so that AOTInductor puts the compiled kernel into a package
(mllm_compile/kernels/states.py). Only the piece compiler imports this module.

Within a chunk (Dao and Gu 2024, arXiv 2405.21060), with G the sum of dt·A up to a token and S the state before it,

    out_i = exp(G_i) S C_i + sum over j <= i of exp(G_i - G_j) (C_i·B_j) dt_j x_j
    S <- exp(G_last) S + sum over j of exp(G_last - G_j) dt_j x_j B_jᵀ

Shape legend: T tokens, R rows of the pool, B requests (where no tensor of that name is meant), H heads, P head width,
G groups, N state size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.states.gated_norm import norm_gated
from mllm_compile.runtime.ops.states.requests import LEAST_LOG_DECAY, softplus

_STEP_WIDTH = 32  # rows of a state in a block
_CHUNK_WIDTH = 64
_CHUNK, _SHORT_CHUNK = 64, 16  # tokens; of a step of few
# Products of 16 bits take B and C as they came, and round a state to 16 bits for them; float32 would take several each.
_CHUNKED_DTYPES = (torch.bfloat16, torch.float16)
_LEAST_SIDE = 16  # of tl.dot
_MOST_CHUNK_STATE = 256  # larger states' chunks do not stay in registers


@triton.jit
def _step_sizes(
    dt: tl.tensor,
    bias: tl.tensor,
    SOFTPLUS: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    HAS_MOST: tl.constexpr,
) -> tl.tensor:
    """dt with its bias, positive, within its bounds."""
    dt = dt.to(tl.float32) + bias
    if SOFTPLUS:
        dt = softplus(dt)
    dt = tl.maximum(dt, LEAST)
    if HAS_MOST:
        dt = tl.minimum(dt, MOST)
    return dt


@triton.jit
def _ssd_kernel(
    x_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    d_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    states_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    has_state_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_token_stride: tl.tensor,
    x_head_stride: tl.tensor,
    x_dim_stride: tl.tensor,
    dt_token_stride: tl.tensor,
    dt_head_stride: tl.tensor,
    b_token_stride: tl.tensor,
    b_group_stride: tl.tensor,
    b_dim_stride: tl.tensor,
    c_token_stride: tl.tensor,
    c_group_stride: tl.tensor,
    c_dim_stride: tl.tensor,
    a_head_stride: tl.tensor,
    d_head_stride: tl.tensor,
    bias_head_stride: tl.tensor,
    HEADS_A_GROUP: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    PADDED_N: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LOG_RATES: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    HAS_MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    DECODES: tl.constexpr,
    WAITS_FIRST: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (block of a head's rows, head, request): its part of the state stays in registers, token by token. With
    CHUNK it goes through chunks of so many tokens, one after another."""
    if WAITS_FIRST:
        wait_for_prerequisites()
    dims = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
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
    numbers = tl.arange(0, PADDED_N)
    is_number = numbers < N
    is_dim = dims < P
    if CHUNK:  # [N, P]: as products take it
        mask = is_number[:, None] & is_dim[None, :]
        of_state = ((row * H + head) * P + dims[None, :]) * N + numbers[:, None]
        of_source = states_ptr + ((source * H + head) * P + dims[None, :]) * N + numbers[:, None]
    else:
        mask = is_dim[:, None] & is_number[None, :]
        of_state = ((row * H + head) * P + dims[:, None]) * N + numbers[None, :]
        of_source = states_ptr + ((source * H + head) * P + dims[:, None]) * N + numbers[None, :]
    state = tl.load(of_source, mask=mask & has_state, other=0.0).to(tl.float32)
    group = head // HEADS_A_GROUP
    rate = tl.load(a_ptr + head * a_head_stride).to(tl.float32)
    if LOG_RATES:
        rate = -tl.exp(rate)
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + head * bias_head_stride).to(tl.float32)
    skip = 0.0
    if HAS_D:
        skip = tl.load(d_ptr + head * d_head_stride).to(tl.float32)
    if EARLY:  # states and weights are on their way: none of the kernels that run now writes them
        wait_for_prerequisites()
    if CHUNK:
        if EARLY:
            start_dependents()
        places_in_chunk = tl.arange(0, CHUNK)
        is_seen = places_in_chunk[:, None] >= places_in_chunk[None, :]
        for first in range(start, end, CHUNK):
            tokens = first + places_in_chunk
            is_token = tokens < end
            of_x = x_ptr + tokens[:, None] * x_token_stride + head * x_head_stride + dims[None, :] * x_dim_stride
            of_b = b_ptr + tokens[:, None] * b_token_stride + group * b_group_stride + numbers[None, :] * b_dim_stride
            of_c = c_ptr + tokens[:, None] * c_token_stride + group * c_group_stride + numbers[None, :] * c_dim_stride
            x = tl.load(of_x, is_token[:, None] & is_dim[None, :], 0.0)
            b = tl.load(of_b, is_token[:, None] & is_number[None, :], 0.0)
            c = tl.load(of_c, is_token[:, None] & is_number[None, :], 0.0)
            dt = tl.load(dt_ptr + tokens * dt_token_stride + head * dt_head_stride, is_token, 0.0)
            dt = tl.where(is_token, _step_sizes(dt, bias, SOFTPLUS, LEAST, MOST, HAS_MOST), 0.0)
            gates = tl.maximum(dt * rate, LEAST_LOG_DECAY)
            decays = tl.cumsum(gates, 0)
            total = tl.sum(gates, 0)
            # Differences of tokens that are not seen are positive: their exponentials might be infinite.
            between = tl.exp(tl.where(is_seen, decays[:, None] - decays[None, :], 0.0)) * dt[None, :]
            inputs = tl.trans(b)
            scores = tl.where(is_seen, tl.dot(c, inputs) * between, 0.0).to(x.dtype)
            out = tl.dot(c, state.to(c.dtype)) * tl.exp(decays)[:, None] + tl.dot(scores, x)
            added = x.to(tl.float32) * (dt * tl.exp(total - decays))[:, None]
            out += skip * x.to(tl.float32)
            of_out = out_ptr + (tokens[:, None] * H + head) * P + dims[None, :]
            tl.store(of_out, out.to(out_ptr.dtype.element_ty), is_token[:, None] & is_dim[None, :])
            state = state * tl.exp(total) + tl.dot(inputs, added.to(x.dtype))
    else:
        for token in range(start, end):
            x = tl.load(x_ptr + token * x_token_stride + head * x_head_stride + dims * x_dim_stride, is_dim, 0.0)
            dt = tl.load(dt_ptr + token * dt_token_stride + head * dt_head_stride)
            b = tl.load(
                b_ptr + token * b_token_stride + group * b_group_stride + numbers * b_dim_stride, is_number, 0.0
            )
            c = tl.load(
                c_ptr + token * c_token_stride + group * c_group_stride + numbers * c_dim_stride, is_number, 0.0
            )
            if EARLY:  # not before: what the next kernel reads ahead would be in the way
                start_dependents()
            x = x.to(tl.float32)
            dt = _step_sizes(dt, bias, SOFTPLUS, LEAST, MOST, HAS_MOST)
            state = state * tl.exp(rate * dt) + (x * dt)[:, None] * b.to(tl.float32)[None, :]
            out = tl.sum(state * c.to(tl.float32)[None, :], 1)
            out += skip * x
            tl.store(out_ptr + (token * H + head) * P + dims, out.to(out_ptr.dtype.element_ty), is_dim)
            state = state.to(states_ptr.dtype.element_ty).to(tl.float32)  # as where the next token is in another step
    tl.store(states_ptr + of_state, state.to(states_ptr.dtype.element_ty), mask & (row > 0) & (end > start))


@triton_op("mllm::ssd_states", mutates_args={"states", "out"})
def ssd_states(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
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
    dt_softplus: bool,
    dt_min: float,
    dt_max: float | None,
    log_rates: bool = False,
    norm_eps: float = 0.0,
    norm_groups: int = 1,
    by_token: bool = False,
    few_tokens: bool = False,
    waits_first: bool = False,
) -> None:
    """runtime/state/layer.py's Ssd; prompts of 16 bits go by chunks. A norm is one more kernel.

    Args:
        x: [T, H, P]; dt: [T, H]; A, D, dt_bias: [H]; B, C: [T, G, N]; of any strides.
        z: [T, H, P], of any strides; norm: [H * P], contiguous; none: outputs are not normed.
        states: [R, H, P, N], contiguous, written at `rows`.
        rows: int64, a request each; has_state: bool, the same.
        sources: int64, the rows where states are read; none: `rows`. Requests with `starts` alone may have others.
        starts, ends: int32, each request's tokens; none: request i has token i alone.
        out: [T, H, P], contiguous, written for requests' tokens.
        dt_softplus, dt_min, dt_max: what becomes of dt.
        log_rates: A stands for -exp(A).
        norm_eps, norm_groups: of the norm behind.
        by_token: prompts go token by token, so that a token's numbers do not depend on where a prompt was cut.
        few_tokens: chunks are short.
        waits_first: a kernel ahead makes what no token has a part in, weights in another type say: nothing is read
            before it has ended.
    """
    is_normed = z is not None and norm is not None
    sums = torch.empty(out.shape, dtype=torch.float32, device=out.device) if is_normed else out
    _compute(
        *(x, dt, A, B, C, D, dt_bias, states, rows, has_state, sources, starts, ends, sums),
        *(dt_softplus, dt_min, dt_max, log_rates, by_token, few_tokens, waits_first),
    )
    if z is not None and norm is not None:
        norm_gated(sums, z, norm, rows, starts, ends, out, norm_eps, norm_groups, few_tokens)


def _compute(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    states: torch.Tensor,
    rows: torch.Tensor,
    has_state: torch.Tensor,
    sources: torch.Tensor | None,
    starts: torch.Tensor | None,
    ends: torch.Tensor | None,
    out: torch.Tensor,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float | None,
    log_rates: bool,
    by_token: bool,
    few_tokens: bool,
    waits_first: bool,
) -> None:
    """ssd_states without the norm."""
    _, heads, width = x.shape
    _, groups, size = B.shape
    is_decode = starts is None or ends is None
    is_chunked = size <= _MOST_CHUNK_STATE and x.dtype in _CHUNKED_DTYPES and x.dtype == B.dtype == C.dtype
    is_chunked = is_chunked and not by_token
    given = (
        *(x, dt, A, B, C),
        A if D is None else D,  # which, as those below, are not read without
        A if dt_bias is None else dt_bias,
        *(states, rows, has_state),
        rows if sources is None else sources,
        rows if starts is None else starts,
        rows if ends is None else ends,
        out,
        *x.stride(),
        *dt.stride(),
        *B.stride(),
        *C.stride(),
        *A.stride(),
        *(A if D is None else D).stride(),
        *(A if dt_bias is None else dt_bias).stride(),
    )
    constants = {
        "HEADS_A_GROUP": heads // groups,
        "H": heads,
        "P": width,
        "N": size,
        "HAS_D": D is not None,
        "HAS_BIAS": dt_bias is not None,
        "LOG_RATES": log_rates,
        "SOFTPLUS": dt_softplus,
        "LEAST": dt_min,
        "MOST": 0.0 if dt_max is None else dt_max,
        "HAS_MOST": dt_max is not None,
        "WAITS_FIRST": waits_first and starts_early(),
        "EARLY": starts_early(),
    }
    by_chunks = is_chunked and not is_decode
    least, widest = (_LEAST_SIDE, _CHUNK_WIDTH) if by_chunks else (1, _STEP_WIDTH)
    block = max(least, min(widest, triton.next_power_of_2(width)))
    chunk = _SHORT_CHUNK if few_tokens else _CHUNK
    wrap_triton(_ssd_kernel)[(triton.cdiv(width, block), heads, rows.shape[0])](
        *given,
        PADDED_N=max(least, triton.next_power_of_2(size)),
        BLOCK=block,
        CHUNK=chunk if by_chunks else 0,
        DECODES=is_decode,
        num_warps=4,
        **({"num_stages": 1} if by_chunks else {}),
        **constants,
    )
