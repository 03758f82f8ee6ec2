"""Rows times the weights of their experts, a block of rows and a tile of columns a program; with silu(gate) * up.

Triton by hand, as `torch.library.triton_op`, so that AOTInductor puts the compiled kernel into the piece's package.
Only the piece compiler imports this module: a loaded package needs neither Triton nor this op.

With few tokens a step reads the weights of every chosen expert once: blocks hold all rows of an expert, and a program
loads while it multiplies. With many tokens a weight's tiles stay in the L2 cache while the blocks of its expert, which
are neighbours, read them.

Shape legend: T tokens, k experts a token, E experts, K inputs, N outputs, B rows of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.experts.shapes import ONE_ROW
from mllm_compile.runtime.ops.shared_memory import most_shared_bytes

_LEAST_TILE = 16  # of a product on tensor cores


@triton.jit
def _grouped_linear_kernel(
    x_ptr: tl.tensor,
    order_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    CHOSEN: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    E: tl.constexpr,
    B: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ONE_ROW: tl.constexpr,
    OF_TOKENS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """COLUMNS outputs of a block of rows. N counts the outputs; a gated weight has twice as many rows."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    tiles: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    block = tl.program_id(0) // tiles
    columns = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    lanes = tl.arange(0, B)
    is_column = columns < N
    if ONE_ROW:
        chosen = tl.load(order_ptr + block)  # the ids themselves: block j is the one token's row j
        num_rows = 1
        is_expert = (chosen >= 0) & (chosen < E)
        expert = tl.where(is_expert, chosen, -1).to(tl.int64)
        rows = tl.where(is_expert, block, -1 - block) + tl.zeros((B,), tl.int32)
    else:
        expert = tl.load(blocks_ptr + 2 * block).to(tl.int64)
        num_rows = tl.load(blocks_ptr + 2 * block + 1)
        rows = tl.load(order_ptr + block * B + lanes, mask=lanes < num_rows, other=0)
    is_row = lanes < num_rows
    if num_rows > 0:
        if expert < 0:
            # Padding gives zeros. A row whose id is no expert's gives NaN, so that its request ends with an error.
            places = tl.where(rows < 0, -1 - rows, rows).to(tl.int64)[:, None] * N + columns[None, :]
            values = tl.where(rows < 0, float("nan"), 0.0)[:, None] + tl.zeros((B, COLUMNS), tl.float32)
            is_place = is_row[:, None] & is_column[None, :]
            tl.store(out_ptr + places, values.to(out_ptr.dtype.element_ty), mask=is_place)
        else:
            depth = tl.arange(0, DEPTH)
            # Lanes without a row read row 0, and are not stored.
            sources = (rows // CHOSEN if OF_TOKENS else rows).to(tl.int64)
            x_at = x_ptr + sources[:, None] * K + depth[None, :]
            OUTPUTS: tl.constexpr = 2 * N if GATED else N
            weight_ptr += expert * OUTPUTS * K
            column_stride: tl.constexpr = 1 if TRANSPOSED else K
            depth_stride: tl.constexpr = OUTPUTS if TRANSPOSED else 1
            # Columns beyond the last read the first ones, and are not stored.
            sources_of_columns = tl.where(is_column, columns, 0)
            at = weight_ptr + depth[:, None] * depth_stride + sources_of_columns[None, :] * column_stride
            total = tl.zeros((B, COLUMNS), tl.float32)
            total_up = tl.zeros((B, COLUMNS), tl.float32)
            for start in range(0, K, DEPTH):
                step = start * depth_stride
                if K % DEPTH == 0:
                    x = tl.load(x_at + start)
                    weight = tl.load(at + step)
                else:
                    is_depth = depth + start < K
                    x = tl.load(x_at + start, mask=is_depth[None, :], other=0.0)
                    weight = tl.load(at + step, mask=is_depth[:, None], other=0.0)
                total = tl.dot(x, weight.to(x.dtype), total, input_precision=PRECISION)
                if GATED:
                    if K % DEPTH == 0:
                        up = tl.load(at + step + N * column_stride)
                    else:
                        up = tl.load(at + step + N * column_stride, mask=is_depth[:, None], other=0.0)  # type: ignore[possibly-undefined]  # K % DEPTH gave it
                    total_up = tl.dot(x, up.to(x.dtype), total_up, input_precision=PRECISION)
            dtype = out_ptr.dtype.element_ty
            if HAS_BIAS:
                bias_at = bias_ptr + expert * OUTPUTS + columns
                total += tl.load(bias_at, mask=is_column, other=0.0).to(tl.float32)[None, :]
                if GATED:
                    total_up += tl.load(bias_at + N, mask=is_column, other=0.0).to(tl.float32)[None, :]
            result = total
            if GATED:
                # Rounded where the traced model rounds: each linear, silu, and the product.
                gate = total.to(dtype).to(tl.float32)
                silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
                result = silu * total_up.to(dtype).to(tl.float32)
            places = rows.to(tl.int64)[:, None] * N + columns[None, :]
            tl.store(out_ptr + places, result.to(dtype), mask=is_row[:, None] & is_column[None, :])


# By the largest block that it is for: columns of a program's tile (of gate and up together), how deep its products are
# at once, warps, and loads under way. The fastest of seven or eight each on an H200, at Qwen3-30B-A3B's shapes with 1
# and 256 tokens (each linear in a CUDA graph, over several sets of experts); the last of seven with 4096 on an H100.
# For 16 the tiling of 32 makes down 15 % faster alone (43.0 µs with 8 tokens). But whole steps of 8 requests took 8.24
# ms with this one and 8.79 with that, on different H200s.
_TILINGS = {
    ONE_ROW: (64, 128, 4, 5),
    16: (64, 256, 4, 3),
    32: (128, 128, 4, 3),
    128: (256, 64, 8, 4),
}
# Of few inputs, by the block: a program has but a few steps, so that another one's loads should be under way beside it.
# The fastest of nine on H200s (benchmarks/kernels/grouped_experts_speed.py): down with 64 tokens takes 103.9 µs in
# place of 118.3, with 256 109.0 in place of 113.3.
_MOST_SHORT_INPUTS = 1024
_SHORT_TILINGS = {16: (128, 128, 4, 2), 32: (256, 64, 8, 3)}


def _tiling(block: int, outputs: int, inputs: int, gated: bool, itemsize: int) -> dict[str, int]:
    """The kernel's sizes for a block; tiles of small weights are smaller, and loads under way fit the shared memory."""
    columns, depth, warps, stages = next(tiling for most, tiling in _TILINGS.items() if block <= most)
    if block in _SHORT_TILINGS and inputs <= _MOST_SHORT_INPUTS and not gated:
        columns, depth, warps, stages = _SHORT_TILINGS[block]
    columns = columns // 2 if gated else columns
    while depth > _LEAST_TILE and depth // 2 >= inputs:
        depth //= 2
    while columns > _LEAST_TILE and columns // 2 >= outputs:
        columns //= 2
    rows = max(block, _LEAST_TILE) + columns * (2 if gated else 1)
    while depth > _LEAST_TILE and 2 * rows * depth * itemsize > most_shared_bytes():
        depth //= 2
    stages = max(2, min(stages, most_shared_bytes() // (rows * depth * itemsize)))
    return {"COLUMNS": columns, "DEPTH": depth, "num_warps": warps, "num_stages": stages}


@triton_op("mllm::grouped_linear", mutates_args={})
def grouped_linear(
    x: torch.Tensor,
    order: torch.Tensor,
    blocks: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    num_chosen: int,
    is_transposed: bool,
    of_tokens: bool,
    is_gated: bool,
    block: int,
) -> torch.Tensor:
    """Multiplies rows by their experts' weights.

    Args:
        x: [T, K] if `of_tokens`, row t·k + j reads token t; else [T·k, K].
        order, blocks: what order_experts gave for `block`; with a block of ONE_ROW the ids [1, k] of one token, and
            None.
        weight: [E, N, K], or [E, K, N] if `is_transposed`; with `is_gated` 2N, the gate first.
        bias: [E, N] or None; with `is_gated` 2N.
        num_chosen: k.
        is_gated: give silu(gate) * up.

    Returns:
        [T·k, N] in the dtype of x. Rows of padding are 0, those whose id is no expert's NaN.
    """
    x, order, weight = x.contiguous(), order.contiguous(), weight.contiguous()
    inputs = x.shape[1]
    outputs = weight.shape[2 if is_transposed else 1] // (2 if is_gated else 1)
    num_rows = x.shape[0] * num_chosen if of_tokens else x.shape[0]
    out = torch.empty((num_rows, outputs), dtype=x.dtype, device=x.device)
    is_one = block == ONE_ROW
    num_blocks = num_chosen if is_one else blocks.shape[0]  # type: ignore[union-attr]
    tiling = _tiling(block, outputs, inputs, is_gated, x.element_size())
    wrap_triton(_grouped_linear_kernel)[(num_blocks * ((outputs + tiling["COLUMNS"] - 1) // tiling["COLUMNS"]),)](
        x,
        order,
        order if blocks is None else blocks,
        weight,
        weight if bias is None else bias,
        out,
        CHOSEN=num_chosen,
        K=inputs,
        N=outputs,
        E=weight.shape[0],
        B=_LEAST_TILE if is_one else block,
        ONE_ROW=is_one,
        OF_TOKENS=of_tokens,
        TRANSPOSED=is_transposed,
        GATED=is_gated,
        HAS_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        EARLY=starts_early(),
        **tiling,
    )
    return out
