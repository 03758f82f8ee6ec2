"""A gated delta net's decodes in one kernel: its convolution, norms of keys and queries, gates, the rule, and the gated
norm.

Triton by hand, as `torch.library.triton_op`, so that AOTInductor puts the compiled kernel into a package
(mllm_compile/kernels/states.py). Only the piece compiler imports this module.

A block has a key head with its value heads: no two blocks convolve the same channels, so each shifts those that it has
read. A request's state was written a step ago, and is on its way before the kernel ahead has ended.

Shape legend: B requests, C channels (Hk queries of D, Hk keys of D, Hv values of Dv, in this order), K kernel width,
Hk key heads, Hv value heads, D key width, Dv value width, R rows of the pool.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.states.gated_norm import norm_gate
from mllm_compile.runtime.ops.states.requests import NORM_EPS, sigmoid, silu, softplus

_WARPS = 4
_BLOCK = 32  # rows of a state: 16 KB with keys of 128 in float32


@triton.jit
def _convolved(
    x_ptr,
    weight_ptr,
    bias_ptr,
    kept_ptr,
    channels,
    is_channel,
    has_state,
    x_channel_stride,
    weight_channel_stride,
    weight_column_stride,
    C: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """(the convolution's outputs, [1, N], and the inputs that it has seen, [PADDED_K, N], the newest of K last)."""
    columns = tl.arange(0, PADDED_K)[:, None]
    seen = tl.load(kept_ptr + columns * C + channels, mask=(columns < K - 1) & is_channel & has_state, other=0.0)
    x = tl.load(x_ptr + channels * x_channel_stride, mask=is_channel, other=0.0)
    seen = tl.where(columns == K - 1, x.to(seen.dtype), seen)
    weights = weight_ptr + channels * weight_channel_stride + columns * weight_column_stride
    weight = tl.load(weights, mask=(columns < K) & is_channel, other=0.0).to(tl.float32)
    out = tl.sum(seen.to(tl.float32) * weight, 0)
    if HAS_BIAS:
        out += tl.sum(tl.load(bias_ptr + channels, mask=is_channel, other=0.0).to(tl.float32), 0)
    if SILU:
        out = silu(out)
    return out, seen


@triton.jit
def _delta_mixer_kernel(
    x_ptr,
    weight_ptr,
    conv_bias_ptr,
    kept_ptr,
    g_ptr,
    beta_ptr,
    a_log_ptr,
    bias_ptr,
    z_ptr,
    norm_ptr,
    states_ptr,
    rows_ptr,
    has_state_ptr,
    out_ptr,
    x_token_stride,
    x_channel_stride,
    weight_channel_stride,
    weight_column_stride,
    g_token_stride,
    g_head_stride,
    g_dim_stride,
    beta_token_stride,
    beta_head_stride,
    z_token_stride,
    z_head_stride,
    z_dim_stride,
    C: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CONV_SILU: tl.constexpr,
    GROUP: tl.constexpr,
    HK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    SCALE: tl.constexpr,
    QK_NORM: tl.constexpr,
    QK_EPS: tl.constexpr,
    GATED: tl.constexpr,
    GATE_A_CHANNEL: tl.constexpr,
    NORMED: tl.constexpr,
    EPS: tl.constexpr,
    SILU: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (key head, request): blocks of its value heads' rows, one after another, the next one on its way."""
    key_head = tl.program_id(0)
    request = tl.program_id(1)
    token = request.to(tl.int64)
    dims = tl.arange(0, PADDED_D)
    places = tl.arange(0, BLOCK)
    is_dim = (dims < D)[None, :]
    # Nothing that a kernel just ahead writes: rows are the step's, and the state is of the step before.
    row = tl.load(rows_ptr + request).to(tl.int64)
    first_head = key_head * GROUP
    states_ptr += (row * HK * GROUP + first_head) * DV * D
    following = tl.load(
        states_ptr + places[:, None] * D + dims[None, :], mask=(places < DV)[:, None] & is_dim, other=0.0
    )
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    has_state = (tl.load(has_state_ptr + request) != 0) & (row > 0)

    x_ptr += token * x_token_stride
    columns = tl.arange(0, PADDED_K)[:, None]
    is_kept = (columns > 0) & (columns < K) & (row > 0)
    kept_ptr += row * (K - 1) * C
    of_q = (key_head * D + dims)[None, :]
    of_k = HK * D + of_q
    q, seen_q = _convolved(
        *(x_ptr, weight_ptr, conv_bias_ptr, kept_ptr, of_q, is_dim, has_state),
        *(x_channel_stride, weight_channel_stride, weight_column_stride, C, K, PADDED_K, HAS_BIAS, CONV_SILU),
    )
    k, seen_k = _convolved(
        *(x_ptr, weight_ptr, conv_bias_ptr, kept_ptr, of_k, is_dim, has_state),
        *(x_channel_stride, weight_channel_stride, weight_column_stride, C, K, PADDED_K, HAS_BIAS, CONV_SILU),
    )
    tl.debug_barrier()  # all have read the inputs that the shifted ones replace
    tl.store(kept_ptr + (columns - 1) * C + of_q, seen_q, mask=is_kept & is_dim)
    tl.store(kept_ptr + (columns - 1) * C + of_k, seen_k, mask=is_kept & is_dim)
    if QK_NORM:
        q *= tl.rsqrt(tl.sum(q * q, 0) + QK_EPS)
        k *= tl.rsqrt(tl.sum(k * k, 0) + QK_EPS)
    q *= SCALE
    blocks = tl.arange(0, BLOCKS)[:, None]
    outs = tl.zeros((BLOCKS, BLOCK), tl.float32)  # of a head
    for index in range(GROUP * BLOCKS):
        member = index // BLOCKS
        block = index % BLOCKS
        head = first_head + member
        values = block * BLOCK + places
        is_value = values < DV
        held = following
        next_values = (index + 1) % BLOCKS * BLOCK + places
        next_rows = (index + 1) // BLOCKS * DV + next_values
        is_next = (next_values < DV)[:, None] & is_dim & (index + 1 < GROUP * BLOCKS)
        following = tl.load(states_ptr + next_rows[:, None] * D + dims[None, :], mask=is_next, other=0.0)
        of_v = (2 * HK * D + head * DV + values)[None, :]
        v, seen_v = _convolved(
            *(x_ptr, weight_ptr, conv_bias_ptr, kept_ptr, of_v, is_value[None, :], has_state),
            *(x_channel_stride, weight_channel_stride, weight_column_stride, C, K, PADDED_K, HAS_BIAS, CONV_SILU),
        )
        tl.debug_barrier()
        tl.store(kept_ptr + (columns - 1) * C + of_v, seen_v, mask=is_kept & is_value[None, :])
        of_g = g_ptr + token * g_token_stride + head * g_head_stride
        beta = tl.load(beta_ptr + token * beta_token_stride + head * beta_head_stride).to(tl.float32)
        if GATE_A_CHANNEL:
            decay = tl.exp(tl.load(of_g + dims * g_dim_stride, dims < D, 0.0).to(tl.float32))[None, :]
        else:
            g = tl.load(of_g).to(tl.float32)
            if GATED:
                rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
                g = rate * softplus(g + tl.load(bias_ptr + head).to(tl.float32))
                beta = sigmoid(beta)
            decay = tl.exp(g)
        state = tl.where(has_state, held.to(tl.float32), 0.0) * decay
        known = tl.sum(state * k[None, :], 1)
        state += ((v - known) * beta)[:, None] * k[None, :]
        out = tl.sum(state * q[None, :], 1)
        of_state = states_ptr + (member * DV + values)[:, None] * D + dims[None, :]
        tl.store(of_state, state.to(states_ptr.dtype.element_ty), is_value[:, None] & is_dim & (row > 0))
        outs = tl.where(blocks == block, out[None, :], outs)
        if block == BLOCKS - 1:
            of_head = blocks * BLOCK + places[None, :]
            if NORMED:
                of_z = z_ptr + token * z_token_stride + head * z_head_stride + of_head * z_dim_stride
                z = tl.load(of_z, of_head < DV, 0.0)
                weight = tl.load(norm_ptr + of_head, of_head < DV, 0.0).to(tl.float32)
                squares = tl.sum(tl.sum(outs * outs, 1), 0)
                outs *= tl.rsqrt(squares / DV + EPS) * weight * norm_gate(z, SILU)
            of_out = out_ptr + (token * HK * GROUP + head) * DV + of_head
            tl.store(of_out, outs.to(out_ptr.dtype.element_ty), of_head < DV)


@triton_op("mllm::gated_delta_mixer", mutates_args={"kept", "states", "out"})
def gated_delta_mixer(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kept: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    z: torch.Tensor | None,
    norm: torch.Tensor | None,
    states: torch.Tensor,
    rows: torch.Tensor,
    has_state: torch.Tensor,
    out: torch.Tensor,
    activation: str,
    qk_l2norm: bool,
    norm_eps: float,
    norm_gate: str,
) -> None:
    """causal_conv_states and then gated_delta_states over its outputs, of decodes: request i has token i alone.

    Args:
        x: [B, C]; weight: [C, K]; bias: [C], contiguous.
        kept: [R, K - 1, C], contiguous: the convolution's states.
        g: [B, Hv] or [B, Hv, D]; beta: [B, Hv]; z: [B, Hv, Dv]; of any strides.
        A_log, dt_bias: [Hv], norm: [Dv], contiguous.
        states: [R, Hv, Dv, D], contiguous. Both are read and written at `rows`.
        rows: [B] int64; has_state: [B] bool.
        out: [B, Hv, Dv], contiguous, written.
        activation: of the convolution: silu, or "".
        qk_l2norm, norm_eps, norm_gate: as GatedDelta has them.
    """
    channels, kernel_width = weight.shape
    _, heads, value_width, width = states.shape
    key_heads = (channels - heads * value_width) // (2 * width)
    block = min(_BLOCK, triton.next_power_of_2(value_width))
    given_z, given_norm = (x if value is None else value for value in (z, norm))  # which, as others, are not read
    wrap_triton(_delta_mixer_kernel)[(key_heads, rows.shape[0])](
        *(x, weight, x if bias is None else bias, kept, g, beta),
        beta if A_log is None else A_log,
        beta if dt_bias is None else dt_bias,
        *(given_z, given_norm, states, rows, has_state, out),
        *x.stride(),
        *weight.stride(),
        *g.stride(),
        *(() if g.dim() == 3 else (0,)),
        *beta.stride(),
        *((0, 0, 0) if z is None else z.stride()),
        C=channels,
        K=kernel_width,
        PADDED_K=triton.next_power_of_2(kernel_width),
        HAS_BIAS=bias is not None,
        CONV_SILU=activation == "silu",
        GROUP=heads // key_heads,
        HK=key_heads,
        DV=value_width,
        BLOCK=block,
        BLOCKS=triton.next_power_of_2(triton.cdiv(value_width, block)),
        D=width,
        PADDED_D=triton.next_power_of_2(width),
        SCALE=width**-0.5,
        QK_NORM=qk_l2norm,
        QK_EPS=NORM_EPS,
        GATED=A_log is not None,
        GATE_A_CHANNEL=g.dim() == 3,
        NORMED=z is not None,
        EPS=norm_eps,
        SILU=norm_gate == "silu",
        EARLY=starts_early(),
        num_warps=_WARPS,
    )
