"""The norm of a head's outputs with the gate behind it, as layers with a state have it: of prompts a kernel of its own.

Imports Triton: only the kernels of this folder need it.

Shape legend: T tokens, B requests, Hv value heads, Dv value width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.states.requests import SEARCHED, sigmoid, silu

_TOKENS, _DECODE_TOKENS = 32, 4  # of a block; of decodes a token is a warp's
_WARPS = 4
_LARGEST = tl.constexpr(2**31 - 1)


@triton.jit
def norm_gate(z, SILU: tl.constexpr):
    """The factor that the gate is."""
    if SILU:
        return silu(z.to(tl.float32))
    return sigmoid(z.to(tl.float32))


@triton.jit
def _gated_norm_kernel(
    out_ptr,
    z_ptr,
    norm_ptr,
    starts_ptr,
    ends_ptr,
    z_token_stride,
    z_head_stride,
    z_dim_stride,
    num_requests,
    HV: tl.constexpr,
    DV: tl.constexpr,
    PADDED_DV: tl.constexpr,
    EPS: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    SEARCHED: tl.constexpr,
    DECODES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (block of tokens, value head). Requests' tokens follow each other: those between the first one's and the
    last one's are normed."""
    least = 0
    behind = num_requests
    if not DECODES:
        least = _LARGEST
        behind = 0
        for first in range(0, num_requests, SEARCHED):
            requests = first + tl.arange(0, SEARCHED)
            is_request = requests < num_requests
            starts = tl.load(starts_ptr + requests, mask=is_request, other=0)
            ends = tl.load(ends_ptr + requests, mask=is_request, other=0)
            least = tl.minimum(least, tl.min(tl.where(ends > starts, starts, _LARGEST), 0))
            behind = tl.maximum(behind, tl.max(tl.where(ends > starts, ends, 0), 0))
    head = tl.program_id(1)
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None].to(tl.int64)
    values = tl.arange(0, PADDED_DV)[None, :]
    mask = (tokens >= least) & (tokens < behind) & (values < DV)
    places = out_ptr + (tokens * HV + head) * DV + values
    of_z = z_ptr + tokens * z_token_stride + head * z_head_stride + values * z_dim_stride
    weight = tl.load(norm_ptr + values, values < DV, 0.0).to(tl.float32)
    if EARLY:
        wait_for_prerequisites()
    out = tl.load(places, mask, 0.0).to(tl.float32)
    gate = norm_gate(tl.load(of_z, mask, 0.0), SILU)
    if EARLY:  # not before: what the next kernel reads ahead would be in the way
        start_dependents()
    out *= tl.rsqrt(tl.sum(out * out, 1) / DV + EPS)[:, None]
    out *= weight * gate
    tl.store(places, out.to(out_ptr.dtype.element_ty), mask)


def norm_outputs(
    out: torch.Tensor,
    z: torch.Tensor,
    norm: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor | None,
    ends: torch.Tensor | None,
    eps: float,
    gate: str,
) -> None:
    """Norms each head's outputs of requests' tokens in place, and multiplies them by the gate.

    Args:
        out: [T, Hv, Dv], contiguous; z: the same shape, of any strides; norm: [Dv], contiguous.
        rows: [B], of the requests.
        starts, ends: [B] int32, each request's tokens; none: request i has token i alone.
        eps: of the norm; gate: silu or sigmoid, of z.
    """
    _, heads, width = out.shape
    is_decode = starts is None or ends is None
    count, tokens = (rows.shape[0], _DECODE_TOKENS) if is_decode else (out.shape[0], _TOKENS)
    wrap_triton(_gated_norm_kernel)[(triton.cdiv(count, tokens), heads)](
        out,
        z,
        norm,
        rows if starts is None else starts,  # which are not read without
        rows if ends is None else ends,
        *z.stride(),
        rows.shape[0],
        HV=heads,
        DV=width,
        PADDED_DV=triton.next_power_of_2(width),
        EPS=eps,
        SILU=gate == "silu",
        TOKENS=tokens,
        SEARCHED=SEARCHED,
        DECODES=is_decode,
        EARLY=starts_early(),
        num_warps=_WARPS,
    )
