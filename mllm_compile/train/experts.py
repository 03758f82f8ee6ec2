"""Gradients of the op of a mixture of experts (runtime/ops/experts/linear.py), in plain torch.

Shape legend: T tokens, k experts a token, E experts, K inputs, N outputs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from mllm_compile.runtime import ops


@cache
def define_gradients() -> None:
    """Gives the op its gradients. Once a process."""
    ops.op("expert_linear")
    torch.library.register_autograd("mllm::expert_linear", _gradients, setup_context=_keep)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, ids, weight, bias, ctx.is_transposed, ctx.of_tokens = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, ids, weight)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, ids, weight, bias and the two flags, by one product for each expert."""
    x, ids, weight = ctx.saved_tensors
    of_x, of_weight = torch.zeros_like(x), torch.zeros_like(weight)
    of_bias = weight.new_zeros(weight.shape[0], grad.shape[1]) if ctx.has_bias else None
    flat = ids.reshape(-1)
    for expert in range(weight.shape[0]):
        rows = (flat == expert).nonzero().squeeze(1)
        if not rows.numel():
            continue
        sources = rows // ids.shape[1] if ctx.of_tokens else rows
        inputs, outputs = x[sources], grad[rows]
        matrix = weight[expert] if ctx.is_transposed else weight[expert].T  # [K, N]
        product = inputs.T @ outputs
        of_weight[expert] = product if ctx.is_transposed else product.T
        of_x.index_add_(0, sources, (outputs @ matrix.T).to(of_x.dtype))
        if of_bias is not None:
            of_bias[expert] = outputs.sum(0)
    return of_x, None, of_weight, of_bias, None, None
