"""Attention sinks with FlashInfer's kernels, which know of none.

A sink is one more logit of a query head that takes part in the softmax and has no value. So it leaves the softmax of
the keys except for a factor: with l the logarithm of the keys' sum of exponentials and s the sink, exp(l) / (exp(l) +
exp(s)) = sigmoid(l - s). FlashInfer returns l to base 2 with the output.

Shape legend: T tokens, H query heads, D head dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch

_LOG2_E = math.log2(math.e)


def run_with_sinks(wrapper: Any, *inputs: Any, out: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """Runs one of FlashInfer's wrappers, planned.

    Args:
        inputs: what its `run` takes.
        out: [T, H, D], written; a row that the wrapper leaves as it is stays so.
        sinks: [H] of the layer, or none.
    """
    if sinks is None:
        wrapper.run(*inputs, out=out)
        return
    log_sums = torch.full(out.shape[:2], math.inf, dtype=torch.float32, device=out.device)
    wrapper.run(*inputs, out=out, lse=log_sums, return_lse=True)
    weigh_by_sinks(out, log_sums, sinks)


def weigh_by_sinks(out: torch.Tensor, log_sums: torch.Tensor, sinks: torch.Tensor) -> None:
    """Multiplies `out` [T, H, D] by what `sinks` [H] leave to the keys, whose `log_sums` [T, H], float32, are to base 2
    and overwritten; infinite ones change nothing."""
    factors = log_sums.sub_(sinks, alpha=_LOG2_E).mul_(math.log(2)).sigmoid_()
    out.mul_(factors.unsqueeze(-1))
