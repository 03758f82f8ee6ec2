"""The RMS norm ahead of a linear of deterministic steps, with the sum of a residual and a linear that it may be of.

Triton by hand, as `torch.library.triton_op`, so that AOTInductor puts the compiled kernel into the piece's package.
Only the piece compiler imports this module: a loaded package needs neither Triton nor this op.

Inductor's kernel lets the next one start when it has read its rows, and reads them twice. This one lets it start at
once: the linear behind it loads its weight while the linear ahead ends and the norm is computed.

Shape legend: K numbers of a row.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.rms_norm_shapes import num_warps


@triton.jit
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    out_ptr: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One row, whose bits no other row changes. The sum is rounded, the norm once behind its weight."""
    if EARLY:
        start_dependents()
    columns = tl.arange(0, BLOCK)
    is_there = columns < K
    weight = tl.load(weight_ptr + columns, mask=is_there, other=0.0).to(tl.float32)
    if PLUS_ONE:
        weight += 1.0
    if EARLY:
        wait_for_prerequisites()
    places = tl.program_id(0).to(tl.int64) * K + columns
    wide = tl.load(x_ptr + places, mask=is_there, other=0.0).to(tl.float32)
    if RESIDUAL:
        wide += tl.load(residual_ptr + places, mask=is_there, other=0.0).to(tl.float32)
        rounded = wide.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + places, rounded, mask=is_there)
        wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / K + EPS)
    tl.store(out_ptr + places, (wide * scale * weight).to(out_ptr.dtype.element_ty), mask=is_there)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, plus_one: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum, which is x without a residual, and its norm."""
    columns = x.shape[-1]
    normed = torch.empty_like(x)
    summed = x if residual is None else torch.empty_like(x)
    wrap_triton(_rms_norm_kernel)[(math.prod(x.shape[:-1]),)](
        x,
        x if residual is None else residual,  # which is not read without
        weight,
        summed,  # which is not written without
        normed,
        K=columns,
        BLOCK=triton.next_power_of_2(columns),
        EPS=eps,  # a float that is no constant reaches a packaged kernel as a double
        RESIDUAL=residual is not None,
        PLUS_ONE=plus_one,
        EARLY=starts_early(),
        num_warps=num_warps(columns),
    )
    return summed, normed


@triton_op("mllm::rms_norm", mutates_args={})
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool = False) -> torch.Tensor:
    """x * rsqrt(mean(x ** 2) + eps) * weight, or times 1 + weight, rounded once: x […, K], weight [K] → […, K]."""
    return _launch(x.contiguous(), None, weight, eps, plus_one)[1]


@triton_op("mllm::add_rms_norm", mutates_args={})
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of x and residual, both […, K] and of one dtype, rounded; and its norm as rms_norm's."""
    return _launch(x.contiguous(), residual.contiguous(), weight, eps, plus_one)
