"""Kernels for a step of one token, where a linear is a read of its weight and everything else is launches.

Triton by hand, as `torch.library.triton_op`, so that AOTInductor puts the compiled kernels into the piece's package.
Only the piece compiler imports this module: a loaded package needs neither Triton nor these ops.

Measured on an H200 in a CUDA graph, weights not in the L2, one behind another (µs; the weight's bytes at 4.58 TB/s /
cuBLAS alone / these, which also do the norm, the activation or the residual): Qwen3-0.6B qkv 1.8 / 5.0 / 3.7, o 0.9 /
12.7 / 2.3, gate_up 2.7 / 6.2 / 4.4, down 1.4 / 7.5 / 2.7; Qwen3-8B qkv 11.0 / 16.2 / 13.9, o 7.3 / 13.4 / 9.0, gate_up
44.0 / 50.4 / 47.3, down 22.0 / 30.9 / 25.6.

Shape legend: K inputs, N outputs of a linear; x has one token, in whatever leading dimensions of size 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.single_token_shapes import choose_blocks


@triton.jit
def _linear_kernel(
    x_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    K: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """BLOCK_N outputs: (norm of x) · rows of the weight, in float32; roundings are where the traced model has them.

    The next block of the weight is asked for before the last is used, the first one before the kernel that makes x has
    ended: what a step of one token waits for is the memory.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dtype = out_ptr.dtype.element_ty
    block = tl.arange(0, BLOCK_K)
    places = rows[:, None] * K + block[None, :]
    weight = tl.load(weight_ptr + places, eviction_policy="evict_first")
    up_weight = weight
    if GATED:
        up_weight = tl.load(weight_ptr + num_rows * K + places, eviction_policy="evict_first")
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    scale = 1.0
    if NORM:  # every block computes the norm again: x is in the L1, a kernel of its own costs a launch
        squares = tl.zeros((BLOCK_K,), tl.float32)
        for k in tl.static_range(0, K, BLOCK_K):
            x = tl.load(x_ptr + k + block).to(tl.float32)
            squares += x * x
        scale = tl.rsqrt(tl.sum(squares, 0) / K + EPS)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up_total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for k in tl.static_range(0, K, BLOCK_K):
        current, up_current = weight, up_weight
        if k + BLOCK_K < K:
            weight = tl.load(weight_ptr + places + (k + BLOCK_K), eviction_policy="evict_first")
            if GATED:
                up_weight = tl.load(weight_ptr + num_rows * K + places + (k + BLOCK_K), eviction_policy="evict_first")
        x = tl.load(x_ptr + k + block)
        if NORM:
            norm_weight = tl.load(norm_weight_ptr + k + block)
            if PLUS_ONE:
                x = (x.to(tl.float32) * scale * (1.0 + norm_weight.to(tl.float32))).to(dtype)
            else:
                x = norm_weight * (x.to(tl.float32) * scale).to(dtype)
        wide = x.to(tl.float32)[None, :]
        total += wide * current.to(tl.float32)
        if GATED:
            up_total += wide * up_current.to(tl.float32)
    out = tl.sum(total, 1).to(dtype)
    if GATED:
        gate = out.to(tl.float32)
        out = (gate / (1.0 + tl.exp(-gate))).to(dtype) * tl.sum(up_total, 1).to(dtype)
    if RESIDUAL:
        out = tl.load(residual_ptr + rows) + out
    tl.store(out_ptr + rows, out)


def _launch(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    num_rows: int,
    eps: float,
    gated: bool,
    plus_one: bool = False,
) -> torch.Tensor:
    columns = weight.shape[1]
    blocks = choose_blocks(columns, is_normed=norm_weight is not None, is_gated=gated)
    out = torch.empty((*x.shape[:-1], num_rows), dtype=x.dtype, device=x.device)
    wrap_triton(_linear_kernel)[(num_rows // blocks.rows,)](
        x,
        x if norm_weight is None else norm_weight,
        weight,
        x if residual is None else residual,
        out,
        num_rows,
        K=columns,
        EPS=eps,  # a float that is no constant reaches a packaged kernel as a double, and with it all that follows
        BLOCK_N=blocks.rows,
        BLOCK_K=blocks.columns,
        NORM=norm_weight is not None,
        PLUS_ONE=plus_one,
        GATED=gated,
        RESIDUAL=residual is not None,
        EARLY=starts_early(),
        num_warps=blocks.num_warps,
    )
    return out


@triton_op("mllm::norm_linear", mutates_args={})
def norm_linear(
    x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool = False
) -> torch.Tensor:
    """linear(rms_norm(x) * norm_weight): x [1, …, K], norm_weight [K], weight [N, K] → [1, …, N]. With `plus_one` the
    norm is times 1 + norm_weight."""
    return _launch(x, norm_weight, weight, None, weight.shape[0], eps, False, plus_one)


@triton_op("mllm::norm_gated_linear", mutates_args={})
def norm_gated_linear(
    x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool = False
) -> torch.Tensor:
    """silu(gate) * up of norm_linear, weight [gate rows; up rows] [2N, K] → [1, …, N]."""
    return _launch(x, norm_weight, weight, None, weight.shape[0] // 2, eps, True, plus_one)


@triton_op("mllm::linear_residual", mutates_args={})
def linear_residual(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """residual + linear(x): x [1, …, K], weight [N, K], residual [1, …, N] → [1, …, N]."""
    return _launch(x, None, weight, residual, weight.shape[0], 0.0, False)
