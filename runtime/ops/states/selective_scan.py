"""Mamba-1's scan over the states of requests, token by token, its channels beside each other.

Triton by hand, as `torch.library.triton_op`, so that AOTInductor puts the compiled kernel into a package
(mllm_compile/kernels/states.py). Only the piece compiler imports this module.

Shape legend: T tokens, C channels, N state size, R rows of the pool.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.states.requests import silu, softplus

_NUMBERS = 1024  # of a block's state: 16 a thread
_WARPS = 2


@triton.jit
def _load_token(
    x_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    z_ptr: tl.tensor,
    token: tl.tensor,
    is_token: tl.tensor,
    channels: tl.tensor,
    is_channel: tl.tensor,
    numbers: tl.tensor,
    is_number: tl.tensor,
    x_token_stride: tl.tensor,
    x_channel_stride: tl.tensor,
    dt_token_stride: tl.tensor,
    dt_channel_stride: tl.tensor,
    b_token_stride: tl.tensor,
    b_dim_stride: tl.tensor,
    c_token_stride: tl.tensor,
    c_dim_stride: tl.tensor,
    z_token_stride: tl.tensor,
    z_channel_stride: tl.tensor,
    HAS_Z: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """x, dt, B, C and z of a token; without z x stands for it, and is not read as such."""
    of_channels = is_channel & is_token
    of_numbers = is_number & is_token
    x = tl.load(x_ptr + token * x_token_stride + channels * x_channel_stride, of_channels, 0.0)
    dt = tl.load(dt_ptr + token * dt_token_stride + channels * dt_channel_stride, of_channels, 0.0)
    b = tl.load(b_ptr + token * b_token_stride + numbers * b_dim_stride, of_numbers, 0.0)
    c = tl.load(c_ptr + token * c_token_stride + numbers * c_dim_stride, of_numbers, 0.0)
    z = x
    if HAS_Z:
        z = tl.load(z_ptr + token * z_token_stride + channels * z_channel_stride, of_channels, 0.0)
    return x, dt, b, c, z


@triton.jit
def _selective_scan_kernel(
    x_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    d_ptr: tl.tensor,
    z_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    states_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    has_state_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_token_stride: tl.tensor,
    x_channel_stride: tl.tensor,
    dt_token_stride: tl.tensor,
    dt_channel_stride: tl.tensor,
    a_channel_stride: tl.tensor,
    a_dim_stride: tl.tensor,
    b_token_stride: tl.tensor,
    b_dim_stride: tl.tensor,
    c_token_stride: tl.tensor,
    c_dim_stride: tl.tensor,
    d_channel_stride: tl.tensor,
    z_token_stride: tl.tensor,
    z_channel_stride: tl.tensor,
    bias_channel_stride: tl.tensor,
    CHANNELS: tl.constexpr,
    N: tl.constexpr,
    PADDED_N: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LOG_RATES: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    BLOCK: tl.constexpr,
    DECODES: tl.constexpr,
    WAITS_FIRST: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (block of channels, request): its part of the state stays in registers."""
    if WAITS_FIRST:
        wait_for_prerequisites()
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request = tl.program_id(1)
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
    is_channel = channels < CHANNELS
    mask = is_channel[:, None] & is_number[None, :]
    of_state = (row * CHANNELS + channels[:, None]) * N + numbers[None, :]
    of_source = states_ptr + (source * CHANNELS + channels[:, None]) * N + numbers[None, :]
    state = tl.load(of_source, mask=mask & has_state, other=0.0).to(tl.float32)
    of_rates = a_ptr + channels[:, None] * a_channel_stride + numbers[None, :] * a_dim_stride
    rates = tl.load(of_rates, mask=mask, other=0.0).to(tl.float32)
    if LOG_RATES:
        rates = -tl.exp(rates)
    bias = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + channels * bias_channel_stride, is_channel, 0.0).to(tl.float32)
    skip = tl.zeros((BLOCK,), tl.float32)
    if HAS_D:
        skip = tl.load(d_ptr + channels * d_channel_stride, is_channel, 0.0).to(tl.float32)
    if EARLY:  # states and weights are on their way: none of the kernels that run now writes them
        wait_for_prerequisites()
    next_x, next_dt, next_b, next_c, next_z = _load_token(
        *(x_ptr, dt_ptr, b_ptr, c_ptr, z_ptr, start, start < end, channels, is_channel, numbers, is_number),
        *(x_token_stride, x_channel_stride, dt_token_stride, dt_channel_stride, b_token_stride, b_dim_stride),
        *(c_token_stride, c_dim_stride, z_token_stride, z_channel_stride, HAS_Z),
    )
    if EARLY:  # not before: what the next kernel reads ahead would be in the way
        start_dependents()
    for token in range(start, end):
        x = next_x.to(tl.float32)
        dt = next_dt.to(tl.float32) + bias
        b = next_b.to(tl.float32)
        c = next_c.to(tl.float32)
        z = next_z.to(tl.float32)
        if not DECODES:  # on their way while this token is computed
            next_x, next_dt, next_b, next_c, next_z = _load_token(
                *(x_ptr, dt_ptr, b_ptr, c_ptr, z_ptr, token + 1, token + 1 < end),
                *(channels, is_channel, numbers, is_number),
                *(x_token_stride, x_channel_stride, dt_token_stride, dt_channel_stride, b_token_stride, b_dim_stride),
                *(c_token_stride, c_dim_stride, z_token_stride, z_channel_stride, HAS_Z),
            )
        if SOFTPLUS:
            dt = softplus(dt)
        state = state * tl.exp(rates * dt[:, None]) + (dt * x)[:, None] * b[None, :]
        out = tl.sum(state * c[None, :], 1) + skip * x
        if HAS_Z:
            out *= silu(z)
        tl.store(out_ptr + token * CHANNELS + channels, out.to(out_ptr.dtype.element_ty), is_channel)
        state = state.to(states_ptr.dtype.element_ty).to(tl.float32)  # as where the next token is in another step
    tl.store(states_ptr + of_state, state.to(states_ptr.dtype.element_ty), mask & (row > 0) & (end > start))


@triton_op("mllm::selective_scan_states", mutates_args={"states", "out"})
def selective_scan_states(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    states: torch.Tensor,
    rows: torch.Tensor,
    has_state: torch.Tensor,
    sources: torch.Tensor | None,
    starts: torch.Tensor | None,
    ends: torch.Tensor | None,
    out: torch.Tensor,
    dt_softplus: bool,
    log_rates: bool = False,
    waits_first: bool = False,
) -> None:
    """runtime/state/layer.py's SelectiveScan.

    Args:
        x, dt, z: [T, C]; A: [C, N]; B, C: [T, N]; D, dt_bias: [C]; of any strides.
        states: [R, C, N], contiguous, written at `rows`.
        rows: int64, a request each; has_state: bool, the same.
        sources: int64, the rows where states are read; none: `rows`. Requests with `starts` alone may have others.
        starts, ends: int32, each request's tokens; none: request i has token i alone.
        out: [T, C], contiguous, written for requests' tokens.
        dt_softplus: whether dt is made positive so.
        log_rates: A stands for -exp(A).
        waits_first: a kernel ahead makes what no token has a part in, weights in another type say: nothing is read
            before it has ended.
    """
    channels, size = A.shape
    padded = triton.next_power_of_2(size)
    block = min(max(1, _NUMBERS // padded), triton.next_power_of_2(channels))
    given_d, given_z, given_bias = (
        other if value is None else value for value, other in ((D, A), (z, x), (dt_bias, A))
    )
    wrap_triton(_selective_scan_kernel)[(triton.cdiv(channels, block), rows.shape[0])](
        *(x, dt, A, B, C, given_d, given_z, given_bias, states, rows, has_state),
        rows if sources is None else sources,
        rows if starts is None else starts,  # which are not read without
        rows if ends is None else ends,
        out,
        *x.stride(),
        *dt.stride(),
        *A.stride(),
        *B.stride(),
        *C.stride(),
        given_d.stride(0),
        *given_z.stride(),
        given_bias.stride(0),
        CHANNELS=channels,
        N=size,
        PADDED_N=padded,
        HAS_D=D is not None,
        HAS_Z=z is not None,
        HAS_BIAS=dt_bias is not None,
        LOG_RATES=log_rates,
        SOFTPLUS=dt_softplus,
        BLOCK=block,
        DECODES=starts is None or ends is None,
        WAITS_FIRST=waits_first and starts_early(),
        EARLY=starts_early(),
        num_warps=_WARPS,
    )
