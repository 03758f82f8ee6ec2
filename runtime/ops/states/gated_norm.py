"""The norm of a layer's outputs with the gate behind or ahead of it, in layers with a state. It is a kernel whose
blocks are a few tokens of one head, or of one group of heads.

Imports Triton: only the kernels of this folder need it.

Shape legend: T tokens, B requests, Hv value heads, Dv value width, H heads, P head width, G groups of a norm, W numbers
of a group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.states.requests import SEARCHED, sigmoid, silu

_TOKENS, _FEW_TOKENS = 32, 4  # of a block; of decodes, and of steps of few tokens, a token is a warp's
_WARPS, _MOST_WARPS = 4, 16
# Numbers of a block of several tokens, and of one warp.
_NUMBERS, _FEW_NUMBERS, _WARP_NUMBERS = 4096, 512, 512
_LARGEST = tl.constexpr(2**31 - 1)


@triton.jit
def norm_gate(z: tl.tensor, SILU: tl.constexpr) -> tl.tensor:
    """The factor that the gate is."""
    if SILU:
        return silu(z.to(tl.float32))
    return sigmoid(z.to(tl.float32))


@triton.jit
def _gated_norm_kernel(
    from_ptr: tl.tensor,
    z_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    out_ptr: tl.tensor,
    z_token_stride: tl.tensor,
    z_head_stride: tl.tensor,
    z_dim_stride: tl.tensor,
    num_requests: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    SILU: tl.constexpr,
    IN_PLACE: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    HEAD_WEIGHTS: tl.constexpr,
    TOKENS: tl.constexpr,
    SEARCHED: tl.constexpr,
    DECODES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (block of tokens, head). Requests' tokens follow each other: those between the first one's and the last
    one's are normed."""
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
    values = tl.arange(0, PADDED_WIDTH)[None, :]
    mask = (tokens >= least) & (tokens < behind) & (values < WIDTH)
    offsets = (tokens * HEADS + head) * WIDTH + values
    of_z = z_ptr + tokens * z_token_stride + head * z_head_stride + values * z_dim_stride
    of_weights = norm_ptr + values
    if HEAD_WEIGHTS:
        of_weights += head * WIDTH
    weight = tl.load(of_weights, values < WIDTH, 0.0).to(tl.float32)
    # The projection that z is of has ended: the recurrence ahead lets this kernel in behind its own wait alone.
    gate = norm_gate(tl.load(of_z, mask, 0.0), SILU)
    if EARLY:
        wait_for_prerequisites()
    if IN_PLACE:
        out = tl.load(out_ptr + offsets, mask, 0.0).to(tl.float32)
    else:
        out = tl.load(from_ptr + offsets, mask, 0.0).to(tl.float32)
    if EARLY:  # not before: what the next kernel reads ahead would be in the way
        start_dependents()
    if GATE_FIRST:
        out *= gate
    out *= tl.rsqrt(tl.sum(out * out, 1) / WIDTH + EPS)[:, None]
    if GATE_FIRST:
        out *= weight
    else:
        out *= weight * gate
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask)


def norm_outputs(
    out: torch.Tensor,
    z: torch.Tensor,
    norm: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor | None,
    ends: torch.Tensor | None,
    eps: float,
    gate: str,
    few_tokens: bool,
) -> None:
    """Norms each head's outputs of requests' tokens in place, and multiplies them by the gate.

    Args:
        out: [T, Hv, Dv], contiguous; z: the same shape, of any strides; norm: [Dv], contiguous.
        rows: [B], of the requests.
        starts, ends: [B] int32, each request's tokens; none: request i has token i alone.
        eps: of the norm; gate: silu or sigmoid, of z.
        few_tokens: blocks are as small as decodes'.
    """
    # A tensor that is normed in place is passed once: torch would copy it if another argument read it too.
    given = (norm, z, norm, rows, starts, ends, out)
    _, heads, width = out.shape
    _launch(*given, heads, width, eps, few_tokens, SILU=gate == "silu", IN_PLACE=True, GATE_FIRST=False)


def norm_gated(
    values: torch.Tensor,
    z: torch.Tensor,
    norm: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor | None,
    ends: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    groups: int,
    few_tokens: bool,
) -> None:
    """Multiplies the outputs of requests' tokens by silu(z), and norms each group of heads together.

    Args:
        values: [T, H, P] float32, contiguous; z: the same shape, of any strides; norm: [H * P], contiguous.
        rows: [B], of the requests.
        starts, ends: [B] int32, each request's tokens; none: request i has token i alone.
        out: [T, H, P], contiguous, written for requests' tokens.
        eps: of the norm.
        groups: G, of H * P / G numbers each.
        few_tokens: as in norm_outputs.
    """
    width = norm.shape[0] // groups
    given = (values, z.reshape(-1, groups, width), norm, rows, starts, ends, out)
    _launch(*given, groups, width, eps, few_tokens, SILU=True, IN_PLACE=False, GATE_FIRST=True)


def _launch(
    values: torch.Tensor,
    z: torch.Tensor,
    norm: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor | None,
    ends: torch.Tensor | None,
    out: torch.Tensor,
    heads: int,
    width: int,
    eps: float,
    few_tokens: bool,
    **constants: bool,
) -> None:
    padded = triton.next_power_of_2(width)
    is_decode = starts is None or ends is None
    count = rows.shape[0] if is_decode else out.shape[0]
    tokens, numbers = (_FEW_TOKENS, _FEW_NUMBERS) if is_decode or few_tokens else (_TOKENS, _NUMBERS)
    tokens = max(1, min(tokens, numbers // padded))
    wrap_triton(_gated_norm_kernel)[(triton.cdiv(count, tokens), heads)](
        values,
        z,
        norm,
        rows if starts is None else starts,  # which are not read without
        rows if ends is None else ends,
        out,
        *z.stride(),
        rows.shape[0],
        HEADS=heads,
        WIDTH=width,
        PADDED_WIDTH=padded,
        EPS=eps,
        HEAD_WEIGHTS=norm.shape[0] != width,
        TOKENS=tokens,
        SEARCHED=SEARCHED,
        DECODES=is_decode,
        EARLY=starts_early(),
        num_warps=min(_MOST_WARPS, max(_WARPS, padded // _WARP_NUMBERS)),
        **constants,
    )
