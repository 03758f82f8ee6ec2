"""The ops of experts' linears whose weights lie in panels, and their references in plain torch (as ops.py).

Shape legend: T tokens, k experts a token, E experts, N outputs, K inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

import torch

from mllm_compile.runtime.ops.experts.linear import products_of_experts
from mllm_compile.runtime.ops.panels.ops import in_floats, rounded_inputs

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")
_LIBRARY.define(
    "integer_panel_expert_linear(Tensor x, Tensor ids, Tensor values, Tensor scales, Tensor? third, Tensor? bias, "
    "int group, bool of_tokens) -> Tensor"
)
_LIBRARY.define(
    "rounded_panel_expert_linear(Tensor x, Tensor ids, Tensor values, Tensor scales, Tensor? third, Tensor? bias, "
    "int group, bool of_tokens) -> Tensor"
)


def integer_panel_expert_linear_reference(
    x: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    third: torch.Tensor | None,
    bias: torch.Tensor | None,
    group: int,
    of_tokens: bool,
) -> torch.Tensor:
    """Multiplies row t·k + j by the weight of expert ids[t, j], in float32.

    Args:
        x: [T, K] if `of_tokens`, every expert of a token reads its one row; else [T·k, K]. In float32 or bfloat16.
        ids: [T, k] in int64 or int32, an expert each.
        values, scales, third: [E, N, …], as integer_panel_linear has [N, …].
        bias: [E, N] in the dtype of x, or None.
        group: inputs that share a scale.

    Returns:
        [T·k, N] in the dtype of x.

    Raises:
        IndexError: an id is no expert's; the library raises RuntimeError.
    """
    return _products(x.float(), ids, values, scales, third, bias, group, of_tokens).to(x.dtype)


def rounded_panel_expert_linear_reference(
    x: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    third: torch.Tensor | None,
    bias: torch.Tensor | None,
    group: int,
    of_tokens: bool,
) -> torch.Tensor:
    """The same of x in eight bits, with a scale for each group of each row."""
    return _products(rounded_inputs(x, group), ids, values, scales, third, bias, group, of_tokens).to(x.dtype)


def _products(
    x: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    third: torch.Tensor | None,
    bias: torch.Tensor | None,
    group: int,
    of_tokens: bool,
) -> torch.Tensor:
    def weight(expert: int) -> torch.Tensor:
        own = None if third is None else third[expert]
        return in_floats(values[expert], scales[expert], own, group, x.shape[1]).T

    wide = None if bias is None else bias.float()
    return products_of_experts(x, ids, values.shape[0], values.shape[1], weight, wide, of_tokens)


def _fake(x: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, *others: object) -> torch.Tensor:
    return x.new_empty(ids.shape[0] * ids.shape[1], values.shape[1])


_LIBRARY.impl("integer_panel_expert_linear", integer_panel_expert_linear_reference, "CompositeExplicitAutograd")
_LIBRARY.impl("rounded_panel_expert_linear", rounded_panel_expert_linear_reference, "CompositeExplicitAutograd")
for _name in ("integer_panel_expert_linear", "rounded_panel_expert_linear"):
    torch.library.register_fake(f"mllm::{_name}", _fake, lib=_LIBRARY)
