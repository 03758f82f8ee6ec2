"""The op of a linear whose inputs and weight are both float8, with a scale a token and a scale a row.

On a GPU the library computes it on fp8 tensor cores; elsewhere float32 does. Pieces call it by name, and quantise the
inputs themselves (passes/quantise_activations.py). Defined as `quantised_linear` is, for the same reason.

Shape legend: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")
_LIBRARY.define("scaled_linear(Tensor x, Tensor x_scales, Tensor values, Tensor scales) -> Tensor")


def scaled_linear(x: torch.Tensor, x_scales: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(x · x_scales) times the transposed (values · scales), on a GPU.

    Args:
        x: [T, K] float8_e4m3fn; K and N are multiples of 16.
        x_scales: [T, 1] float32.
        values: [N, K] float8_e4m3fn.
        scales: [N, 1] float32.

    Returns:
        [T, N] bfloat16.
    """
    # With fast sums, as other servers have it: a sum's own precision is far beyond that of its operands.
    return torch._scaled_mm(
        x, values.t(), scale_a=x_scales, scale_b=scales.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )


def scaled_linear_reference(
    x: torch.Tensor, x_scales: torch.Tensor, values: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Computes what `scaled_linear` does, by float32."""
    return ((x.float() @ values.float().t()) * x_scales * scales.t()).to(torch.bfloat16)


_LIBRARY.impl("scaled_linear", scaled_linear, "CUDA")
_LIBRARY.impl("scaled_linear", scaled_linear_reference, "CPU")
torch.library.register_fake(
    "mllm::scaled_linear",
    lambda x, x_scales, values, scales: x.new_empty((x.shape[0], values.shape[0]), dtype=torch.bfloat16),
    lib=_LIBRARY,
)
