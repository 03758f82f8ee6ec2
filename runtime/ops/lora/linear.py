"""A linear of many tokens with its adapters: what they add is written first, and the linear's product is added to it.

Outputs are written once, then read and written by the product; behind it they would be read and written once more.
Short steps have kernels of their own; which are launched is chosen by the number of tokens, as a launch of no blocks is
none.

Shape legend: T tokens, K inputs and N outputs of the linear, P of its parts with adapters, r their rank, L slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
from torch.library import triton_op

from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.lora.fill import fill
from mllm_compile.runtime.ops.lora.shapes import SHORT_STEP, num_splits
from mllm_compile.runtime.ops.lora.shrink import by_loops, summed
from mllm_compile.runtime.ops.lora.stretches import written

_MOST_LENGTHS = 1 << 20  # of SHORT_STEP tokens


@triton_op("mllm::lora_linear", mutates_args={})
def lora_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    slots: torch.Tensor,
    starts: Sequence[int],
    rows: Sequence[int],
) -> torch.Tensor:
    """x times the transposed weight, plus B A x of each token's adapter.

    What adapters add is rounded, and so is the sum. A token's numbers do not depend on other tokens' adapters.

    Args:
        x: [..., K] of T tokens; weight: [N, K]; a: [L, P * r, K]; b: [L, sum of rows, r]; all of one dtype.
        slots: [T] int32, each token's slot; -1: it has no adapter.
        starts, rows: [P] the outputs of each part; takes_lora says which are taken.

    Returns:
        [..., N] in the dtype of x.
    """
    x = x.contiguous()
    num_tokens = math.prod(x.shape[:-1])
    sums = torch.empty((num_splits(x.shape[-1]), num_tokens, a.shape[1]), dtype=torch.float32, device=x.device)
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    is_long = triton.cdiv(num_tokens // (SHORT_STEP + 1), _MOST_LENGTHS)  # 0 or 1
    by_loops(x, a, slots, sums, is_few=True, is_launched=1 - is_long)
    fill(sums, b, slots, starts, rows, out, 1 - is_long)
    by_loops(x, a, slots, sums, is_few=False, is_launched=is_long)
    written(None, summed(sums, x.dtype, is_long), b, slots, starts, rows, out, is_long)
    op("add_product")(out, x, weight)
    return out
