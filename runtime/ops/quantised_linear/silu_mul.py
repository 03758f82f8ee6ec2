"""silu(gate) * up as the inputs of a linear in fp8; gate and up are the halves of another linear's output.

Triton by hand, as ops/silu_mul.py, for the same reasons. With that op, and a kernel of Inductor's behind it that finds
the largest of each token's numbers and divides by it, the product is written once and read twice more.

Shape legend: T tokens, N columns of gate, G groups of columns that share a scale.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.quantised.scheme import FP8_MAX, SMALLEST_SCALE

_BLOCK_GROUPS = 8  # of one program, at most
_THREAD_NUMBERS = 16  # of a thread


@triton.jit
def _silu_mul_in_fp8_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """GROUPS groups of one token; WIDTH is the power of two that GROUP columns are in."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    # One dimension: CUDA's second one ends at 65535, and a step may have more tokens.
    blocks: tl.constexpr = N // (GROUP * GROUPS)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    groups = tl.program_id(0) % blocks * GROUPS + tl.arange(0, GROUPS)
    inner = tl.arange(0, WIDTH)
    columns = groups[:, None] * GROUP + inner[None, :]
    is_there = (inner < GROUP)[None, :]
    gate = tl.load(x_ptr + token * 2 * N + columns, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * 2 * N + N + columns, mask=is_there, other=0.0)
    silu = gate / (1.0 + tl.exp(-gate))
    numbers = (silu.to(up.dtype) * up).to(tl.float32)
    scales = tl.maximum(tl.max(tl.abs(numbers), axis=1) * (1.0 / LARGEST), SMALLEST)
    scaled = numbers / scales[:, None]
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    tl.store(out_ptr + token * N + columns, scaled.to(out_ptr.dtype.element_ty), mask=is_there)
    tl.store(scales_ptr + token * (N // GROUP) + groups, scales)


@triton_op("mllm::silu_mul_in_fp8", mutates_args={})
def silu_mul_in_fp8(x: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Args:
        x: […, 2N], gate first.
        groups: G, which divides N.

    Returns:
        [T, N] float8_e4m3fn and [T, G] float32, whose product is silu(gate) * up.
    """
    x = x.contiguous()
    columns, tokens = x.shape[-1] // 2, math.prod(x.shape[:-1])
    group, of_block = columns // groups, math.gcd(groups, _BLOCK_GROUPS)
    out = torch.empty((tokens, columns), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((tokens, groups), dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(group)
    num_warps = min(max(width * of_block // (32 * _THREAD_NUMBERS), 1), 32)
    wrap_triton(_silu_mul_in_fp8_kernel)[(groups // of_block * tokens,)](
        x,
        out,
        scales,
        N=columns,
        GROUP=group,
        WIDTH=width,
        GROUPS=of_block,
        LARGEST=FP8_MAX,
        SMALLEST=SMALLEST_SCALE,
        EARLY=starts_early(),
        num_warps=num_warps,
    )
    return out, scales
