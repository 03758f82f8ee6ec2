"""The op of a mixture of experts whose weights are in memory in few bits (runtime/quantised/scheme.py).

The reference dequantises the weights of the experts that were chosen, one after another, and multiplies, in plain
torch: compiled pieces call it by name on a CPU. On a GPU it is kernels (grouped_quantised.py), as with plain weights
(linear.py), and defined in the same way for the same reason.

Shape legend: T tokens, k experts a token, E experts, K inputs, N outputs, G groups of inputs.
"""

from __future__ import annotations

import torch

from mllm_compile.runtime.ops.experts.linear import order_of_step, products_of_experts
from mllm_compile.runtime.quantised.numbers import dequantised
from mllm_compile.runtime.quantised.scheme import SCALES, VALUES, third_role

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")
_LIBRARY.define(
    "quantised_expert_linear(Tensor x, Tensor ids, Tensor values, Tensor scales, Tensor? zeros, Tensor? bias, "
    "str kind, int group, bool of_tokens) -> Tensor"
)


def quantised_expert_linear_reference(
    x: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: str,
    group: int,
    of_tokens: bool,
) -> torch.Tensor:
    """Multiplies row t·k + j by the weight of expert ids[t, j], which is dequantised to the dtype of x.

    Args:
        x: [T, K] if `of_tokens`, every expert of a token reads its one row; else [T·k, K].
        ids: [T, k] integers, an expert each.
        values, scales, zeros, kind, group: the weight [E, N, K], as WeightScheme has it.
        bias: [E, N] or None.

    Returns:
        [T·k, N] in the dtype of x.

    Raises:
        IndexError: an id is no expert's.
    """
    flat = {VALUES: values, SCALES: scales, third_role(kind): zeros}

    def weight(expert: int) -> torch.Tensor:
        tensors = {role: None if one is None else one[expert] for role, one in flat.items()}
        return dequantised(tensors, kind, group, x.shape[1], x.dtype).T

    return products_of_experts(x, ids, values.shape[0], values.shape[1], weight, bias, of_tokens)


def _by_kernels(
    x: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: str,
    group: int,
    of_tokens: bool,
) -> torch.Tensor:
    """The same without a wait for the ids, so that it can be captured; a row whose id is no expert's is NaN."""
    from mllm_compile.runtime.ops import op

    order, blocks, block = order_of_step(ids, values.shape[0])
    how = (kind, group, ids.shape[1], of_tokens, False, block)
    out: torch.Tensor = op("quantised_grouped_linear")(x, order, blocks, values, scales, zeros, bias, *how)
    return out


def _fake(
    x: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: str,
    group: int,
    of_tokens: bool,
) -> torch.Tensor:
    return x.new_empty(ids.shape[0] * ids.shape[1], values.shape[1])


_LIBRARY.impl("quantised_expert_linear", quantised_expert_linear_reference, "CompositeExplicitAutograd")
_LIBRARY.impl("quantised_expert_linear", _by_kernels, "CUDA")
torch.library.register_fake("mllm::quantised_expert_linear", _fake, lib=_LIBRARY)
