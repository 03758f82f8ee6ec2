"""Tokens' rows in the order of their experts: what the tiles' kernels read by TMA, which takes neighbours alone.

Triton by hand, as `torch.library.triton_op`, so that AOTInductor puts the compiled kernel into the piece's package.
Only the piece compiler imports this module: a loaded package needs neither Triton nor this op.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites
from mllm_compile.runtime.ops.expert_tiles.shapes import BLOCK

_ROWS = 8  # of a program
_COLUMNS = 1024  # at a time


@triton.jit
def _gather_kernel(
    x_ptr,
    order_ptr,
    blocks_ptr,
    out_ptr,
    CHOSEN: tl.constexpr,
    K: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(0) * ROWS // B
    num_rows = tl.load(blocks_ptr + 2 * block + 1)
    if (tl.load(blocks_ptr + 2 * block) >= 0) & (tl.program_id(0) * ROWS % B < num_rows):
        is_row = places % B < num_rows
        tokens = tl.load(order_ptr + places, mask=is_row, other=0) // CHOSEN
        for first in range(0, K, COLUMNS):
            columns = first + tl.arange(0, COLUMNS)
            is_value = is_row[:, None] & (columns < K)[None, :]
            values = tl.load(x_ptr + tokens.to(tl.int64)[:, None] * K + columns[None, :], mask=is_value)
            tl.store(out_ptr + places.to(tl.int64)[:, None] * K + columns[None, :], values, mask=is_value)


@triton_op("mllm::gather_expert_rows", mutates_args={})
def gather_expert_rows(x: torch.Tensor, order: torch.Tensor, blocks: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """Copies to each place of `order` the row of its token.

    Args:
        x: [T, K].
        order, blocks: what order_experts gave for blocks of BLOCK rows.
        num_chosen: k.

    Returns:
        [P, K], one for each place of `order`; places of no expert's row hold anything.
    """
    x = x.contiguous()
    out = torch.empty((order.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)
    wrap_triton(_gather_kernel)[(order.shape[0] // _ROWS,)](
        x,
        order,
        blocks,
        out,
        CHOSEN=num_chosen,
        K=x.shape[1],
        B=BLOCK,
        ROWS=_ROWS,
        COLUMNS=min(_COLUMNS, triton.next_power_of_2(x.shape[1])),
        EARLY=starts_early(),
    )
    return out
