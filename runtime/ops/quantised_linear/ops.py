"""The op of a linear whose weight is in memory in few bits (runtime/quantised/scheme.py), and its reference.

It dequantises the weight and multiplies, in plain torch: right on every device, with nothing gained but memory. Pieces
call it by name. Defined with torch.library's define/impl because calling a `torch.library.custom_op` imports Dynamo and
Inductor.

Shape legend: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from mllm_compile.runtime.quantised.numbers import dequantised
from mllm_compile.runtime.quantised.scheme import SCALES, VALUES, third_role

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")
_LIBRARY.define(
    "quantised_linear(Tensor x, Tensor values, Tensor scales, Tensor? zeros, Tensor? bias, str kind, int group)"
    " -> Tensor"
)


def quantised_linear_reference(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: str,
    group: int,
) -> torch.Tensor:
    """x times the transposed weight, which is dequantised to the dtype of x.

    Args:
        x: [..., K].
        values, scales, zeros, kind, group: the weight [N, K], as WeightScheme has it; of nvfp4 `zeros` are the factors.
        bias: [N] in the dtype of x, or None.

    Returns:
        [..., N] in the dtype of x.
    """
    tensors = {VALUES: values, SCALES: scales, third_role(kind): zeros}
    return functional.linear(x, dequantised(tensors, kind, group, x.shape[-1], x.dtype), bias)


def _fake(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: str,
    group: int,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], values.shape[0]))


_LIBRARY.impl("quantised_linear", quantised_linear_reference, "CompositeExplicitAutograd")
torch.library.register_fake("mllm::quantised_linear", _fake, lib=_LIBRARY)
