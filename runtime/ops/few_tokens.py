"""Computes linears of a step of few tokens: still reads of weights, but with tensor-core products.

Triton by hand, as `torch.library.triton_op`, so that AOTInductor puts the compiled kernels into the piece's package.
Only the piece compiler imports this module: a loaded package needs neither Triton nor these ops.

An RMS norm between two linears needs no kernel. The first one writes its output h, h · norm_weight, and the sums of
squares of h over each block of columns. The second one multiplies its product with h · norm_weight by the norm's
factor, which is the same for a whole row.

Shape legend: T tokens, K inputs, N outputs of a linear, B blocks of columns of the norm's input.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.few_tokens_shapes import MAX_FEW_TOKENS, choose_few_token_blocks
from mllm_compile.runtime.ops.shared_memory import most_shared_bytes


@triton.jit
def _sum_of_groups(products: tl.tensor, GROUPS: tl.constexpr) -> tl.tensor:
    if GROUPS > 1:
        products = tl.sum(products, 0)
    return products


@triton.jit
def _few_linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scaled_ptr: tl.tensor,
    out_squares_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    K: tl.constexpr,
    EPS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SQUARES: tl.constexpr,
    PADDED_SQUARES: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM_NEXT: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """BLOCK_N outputs of BLOCK_T tokens.

    GROUPS of warps share the inputs among them, so that no chain of products is long. The first block of the weight is
    asked for before the kernel that makes x has ended, and used last.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = tokens < num_tokens
    dtype = out_ptr.dtype.element_ty
    block = tl.arange(0, BLOCK_K)
    weight_places = rows[None, :] * K + block[:, None]
    x_places = tokens[:, None] * K + block[None, :]
    x_mask = is_token[:, None]
    if GROUPS > 1:
        starts = tl.arange(0, GROUPS)[:, None, None] * (K // GROUPS)
        weight_places = starts + weight_places[None, :, :]
        x_places = starts + x_places[None, :, :]
        x_mask = x_mask[None, :, :]
        total = tl.zeros((GROUPS, BLOCK_T, BLOCK_N), tl.float32)
    else:
        total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    up_total = total
    weights = weight_ptr + weight_places
    up_weights = weights + num_rows * K
    xs = x_ptr + x_places
    weight = tl.load(weights, eviction_policy="evict_first")
    up_weight = weight
    if GATED:
        up_weight = tl.load(up_weights, eviction_policy="evict_first")
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    places = tokens[:, None] * num_rows + rows[None, :]
    is_place = is_token[:, None]
    residual = 0.0
    if RESIDUAL:
        residual = tl.load(residual_ptr + places, mask=is_place, other=0.0)
    squares = 0.0
    if SQUARES > 0:
        blocks = tl.arange(0, PADDED_SQUARES)
        is_square = is_place & (blocks < SQUARES)[None, :]
        squares = tl.load(squares_ptr + tokens[:, None] * SQUARES + blocks[None, :], mask=is_square, other=0.0)
    for k in tl.range(BLOCK_K, K // GROUPS, BLOCK_K, num_stages=STAGES):
        x = tl.load(xs + k, mask=x_mask, other=0.0)
        total = tl.dot(x, tl.load(weights + k, eviction_policy="evict_first"), total)
        if GATED:
            up_total = tl.dot(x, tl.load(up_weights + k, eviction_policy="evict_first"), up_total)
    x = tl.load(xs, mask=x_mask, other=0.0)
    product = _sum_of_groups(tl.dot(x, weight, total), GROUPS)
    if SQUARES > 0:
        factor = tl.rsqrt(tl.sum(squares, 1) / K + EPS)[:, None]
        product *= factor
    out = product.to(dtype)
    if GATED:
        up_product = _sum_of_groups(tl.dot(x, up_weight, up_total), GROUPS)
        if SQUARES > 0:
            up_product *= factor  # type: ignore[possibly-undefined]  # SQUARES gave it
        gate = out.to(tl.float32)
        out = (gate / (1.0 + tl.exp(-gate))).to(dtype) * up_product.to(dtype)
    if RESIDUAL:
        out = residual + out
    tl.store(out_ptr + places, out, mask=is_place)
    if NORM_NEXT:
        wide = out.to(tl.float32)
        by = tl.load(norm_weight_ptr + rows).to(tl.float32)
        if PLUS_ONE:
            by += 1.0
        tl.store(scaled_ptr + places, (wide * by[None, :]).to(dtype), mask=is_place)
        sums = tl.sum(tl.where(is_place, wide * wide, 0.0), 1)
        tl.store(out_squares_ptr + tokens * tl.num_programs(0) + tl.program_id(0), sums, mask=is_token)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    num_rows: int,
    squares: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    plus_one: bool = False,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, h · norm_weight, sums of squares of h); the latter two are x without a norm behind."""
    x = x.contiguous()
    columns = weight.shape[1]
    num_tokens = math.prod(x.shape[:-1])
    blocks = choose_few_token_blocks(num_rows, columns, is_gated=gated).within(most_shared_bytes(), is_gated=gated)
    num_blocks = num_rows // blocks.rows
    out = torch.empty((*x.shape[:-1], num_rows), dtype=x.dtype, device=x.device)
    scaled, out_squares = x, x
    if norm_weight is not None:
        scaled = torch.empty_like(out)
        out_squares = torch.empty((*x.shape[:-1], num_blocks), dtype=torch.float32, device=x.device)
    num_squares = 0 if squares is None else squares.shape[-1]
    wrap_triton(_few_linear_kernel)[(num_blocks, triton.cdiv(num_tokens, MAX_FEW_TOKENS))](
        x,
        weight,
        x if squares is None else squares,
        x if residual is None else residual,
        x if norm_weight is None else norm_weight,
        out,
        scaled,
        out_squares,
        num_tokens,
        num_rows,
        K=columns,
        EPS=eps,
        GROUPS=blocks.groups,
        BLOCK_T=MAX_FEW_TOKENS,
        BLOCK_N=blocks.rows,
        BLOCK_K=blocks.columns,
        STAGES=blocks.stages,
        SQUARES=num_squares,
        PADDED_SQUARES=triton.next_power_of_2(max(num_squares, 1)),
        GATED=gated,
        RESIDUAL=residual is not None,
        NORM_NEXT=norm_weight is not None,
        PLUS_ONE=plus_one,
        EARLY=starts_early(),
        num_warps=blocks.num_warps,
        num_stages=blocks.stages,
    )
    return out, scaled, out_squares


@triton_op("mllm::few_linear", mutates_args={})
def few_linear(
    x: torch.Tensor, weight: torch.Tensor, squares: torch.Tensor | None, eps: float, gated: bool
) -> torch.Tensor:
    """Returns x · weightᵀ, of a norm and gated if so asked.

    Args:
        x: […, K], contiguous: right for any number of tokens, fast up to MAX_FEW_TOKENS.
        weight: [N, K]; of a gated one [gate rows; up rows], [2N, K].
        squares: […, B] float32: x is h · norm_weight and these are the sums of squares of h; None: x is taken as it is.
        eps: the norm's.
        gated: silu(gate) * up.

    Returns:
        […, N] in x's dtype.
    """
    num_rows = weight.shape[0] // 2 if gated else weight.shape[0]
    return _launch(x, weight, num_rows, squares=squares, eps=eps, gated=gated)[0]


@triton_op("mllm::few_linear_residual", mutates_args={})
def few_linear_residual(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """residual + x · weightᵀ: x […, K], weight [N, K], residual […, N] → […, N]."""
    return _launch(x, weight, weight.shape[0], residual=residual.contiguous())[0]


@triton_op("mllm::few_linear_residual_norm", mutates_args={})
def few_linear_residual_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, plus_one: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """h = residual + x · weightᵀ, h · norm_weight, and sums of squares of h.

    Args:
        x: […, K]; weight: [N, K]; residual: […, N]; norm_weight: [N].
        plus_one: the second is h · (1 + norm_weight).

    Returns:
        The two of x's dtype […, N], the sums float32 […, B]: few_linear goes on from the latter two.
    """
    residual = residual.contiguous()
    return _launch(x, weight, weight.shape[0], residual=residual, norm_weight=norm_weight, plus_one=plus_one)
