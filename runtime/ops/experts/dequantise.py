"""Experts' weights in MXFP4 (runtime/quantised/scheme.py) as plain ones, for products of many tokens.

Triton by hand, as ops/quantised_linear/integers.py.

Shape legend: E experts, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.experts.grouped_quantised import four_bit_float, powers_of_two

_GROUP = 32  # inputs that share a scale
_GROUPS = 128  # of a program


@triton.jit
def _dequantise_kernel(
    values_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_groups: tl.tensor,
    GROUPS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    groups = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    is_there = groups < num_groups
    codes = tl.load(values_ptr + groups[:, None] * 16 + tl.arange(0, 16)[None, :], mask=is_there[:, None], other=0)
    powers = powers_of_two(tl.load(scales_ptr + groups, mask=is_there, other=0), tl.float32)[:, None]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    low, high = four_bit_float(codes, powers, dtype), four_bit_float(codes >> 4, powers, dtype)
    numbers = tl.reshape(tl.join(low, high), (GROUPS, 32))
    if EARLY:  # no kernel writes weights, but the one ahead may read where this one writes
        wait_for_prerequisites()
        start_dependents()
    tl.store(out_ptr + groups[:, None] * 32 + tl.arange(0, 32)[None, :], numbers, mask=is_there[:, None])


@triton_op("mllm::dequantised_experts", mutates_args={})
def dequantised_experts(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """
    Args:
        values, scales: [E, N, K/2] and [E, N, K/32] uint8, as MXFP4 has them; 32 divides K.

    Returns:
        [E, N, K] in `dtype`, exactly but for its range.
    """
    experts, rows, half = values.shape
    weight = torch.empty((experts, rows, 2 * half), dtype=dtype, device=values.device)
    num_groups = experts * rows * half * 2 // _GROUP
    wrap_triton(_dequantise_kernel)[(triton.cdiv(num_groups, _GROUPS),)](
        values.contiguous(),
        scales.contiguous(),
        weight,
        num_groups,
        GROUPS=_GROUPS,
        EARLY=starts_early(),
        num_warps=4,
    )
    return weight
