"""The sum of each token's experts' outputs, times their weights.

Triton by hand, as `torch.library.triton_op`, so that AOTInductor puts the compiled kernel into the piece's package.
Only the piece compiler imports this module: a loaded package needs neither Triton nor this op.

Shape legend: T tokens, k experts a token, N outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from mllm_compile.runtime.ops.dependent_launch import start_dependents, starts_early, wait_for_prerequisites

_MOST_COLUMNS = 1024  # of a program


@triton.jit
def _sum_kernel(
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    CHOSEN: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """COLUMNS outputs of one token; roundings are where the traced model has them."""
    if EARLY:
        wait_for_prerequisites()
        start_dependents()
    blocks: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    token = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    dtype = out_ptr.dtype.element_ty
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in tl.static_range(CHOSEN):
        row = token * CHOSEN + choice
        values = tl.load(rows_ptr + row * N + columns, mask=columns < N, other=0.0).to(tl.float32)
        product = values * tl.load(weights_ptr + row).to(tl.float32)
        total += product if WIDE else product.to(dtype).to(tl.float32)
    tl.store(out_ptr + token * N + columns, total.to(dtype), mask=columns < N)


@triton_op("mllm::sum_experts", mutates_args={})
def sum_experts(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Adds up the rows of each token, each times its weight, in float32.

    Args:
        rows: [T·k, N].
        weights: [T, k] in float32, or in the dtype of the rows; products are then rounded to it.

    Returns:
        [T, N] in the dtype of the rows.
    """
    rows, weights = rows.contiguous(), weights.contiguous()
    num_tokens, num_chosen = weights.shape
    outputs = rows.shape[1]
    out = torch.empty((num_tokens, outputs), dtype=rows.dtype, device=rows.device)
    columns = min(_MOST_COLUMNS, triton.next_power_of_2(outputs))
    wrap_triton(_sum_kernel)[(num_tokens * ((outputs + columns - 1) // columns),)](
        rows,
        weights,
        out,
        CHOSEN=num_chosen,
        N=outputs,
        COLUMNS=columns,
        WIDE=weights.dtype == torch.float32,
        EARLY=starts_early(),
    )
    return out
