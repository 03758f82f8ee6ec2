"""The ops of linears whose weights lie in panels (layout.py), and their references in plain torch.

A CPU's library (library.py) replaces the references, which serve where none is loaded. Defined with torch.library's
define/impl because calling a `torch.library.custom_op` imports Dynamo and Inductor.

Shape legend: N outputs, K inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from mllm_compile.runtime.ops.panels.layout import VALUES_UNIT, in_rows
from mllm_compile.runtime.quantised.numbers import dequantised
from mllm_compile.runtime.quantised.scheme import SCALES, VALUES, Kind, third_role

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")
_LIBRARY.define("panel_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_LIBRARY.define(
    "integer_panel_linear(Tensor x, Tensor values, Tensor scales, Tensor? third, Tensor? bias, int group) -> Tensor"
)
_LIBRARY.define(
    "rounded_panel_linear(Tensor x, Tensor values, Tensor scales, Tensor? third, Tensor? bias, int group) -> Tensor"
)


def panel_linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x times the transposed weight.

    Args:
        x: [..., K] in float32 or bfloat16.
        weight: [N, K] in panels, in the dtype of x.
        bias: [N] likewise, or None.

    Returns:
        [..., N] in the dtype of x.
    """
    return functional.linear(x, in_rows(weight, VALUES_UNIT), bias)


def integer_panel_linear_reference(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    third: torch.Tensor | None,
    bias: torch.Tensor | None,
    group: int,
) -> torch.Tensor:
    """x times the transposed weight, in float32.

    Args:
        x: [..., K] in float32 or bfloat16.
        values: [N, K] int8, or uint8 beside offsets; [N, K / 2] uint8 of four bits; in panels, as are all below.
        scales: [N, G] in float32, float16 or bfloat16; in uint8 powers of two, of four-bit floats (MXFP4).
        third: [N, G]: zero points in uint8, or offsets in the scales' dtype; or None.
        bias: [N] in the dtype of x, or None.
        group: inputs that share a scale; they divide K, and 8 divides them.

    Returns:
        [..., N] in the dtype of x.
    """
    weight = in_floats(values, scales, third, group, x.shape[-1])
    return functional.linear(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)


def rounded_panel_linear_reference(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    third: torch.Tensor | None,
    bias: torch.Tensor | None,
    group: int,
) -> torch.Tensor:
    """The same of x in eight bits, with a scale for each group of each token."""
    wide = None if bias is None else bias.float()
    return integer_panel_linear_reference(rounded_inputs(x, group), values, scales, third, wide, group).to(x.dtype)


def rounded_inputs(x: torch.Tensor, group: int) -> torch.Tensor:
    """The inputs [..., K] in float32, rounded to eight bits with a scale for each group."""
    groups = x.float().unflatten(-1, (-1, group))
    largest = groups.abs().amax(-1, keepdim=True)
    rounded = (groups * torch.where(largest > 1e-30, 127 / largest, 0)).round() * (largest / 127)
    return rounded.flatten(-2)


def in_floats(
    values: torch.Tensor, scales: torch.Tensor, third: torch.Tensor | None, group: int, columns: int
) -> torch.Tensor:
    """The weight [N, K], or [E, N, K], in float32 that these tensors in panels are."""
    kind = _kind(values, scales, third, columns)
    units = (values, VALUES_UNIT), (scales, scales.itemsize), (third, 0 if third is None else third.itemsize)
    tensors = [None if one is None else in_rows(one, unit) for one, unit in units]
    roles = dict(zip((VALUES, SCALES, third_role(kind)), tensors, strict=True))
    return dequantised(roles, kind, group, columns, torch.float32)


def _kind(values: torch.Tensor, scales: torch.Tensor, third: torch.Tensor | None, columns: int) -> Kind:
    if values.dtype == torch.int8:
        return "int8"
    if scales.dtype == torch.uint8:
        return "mxfp4"
    has_offsets = third is not None and third.is_floating_point()
    if values.shape[-1] == columns:
        return "int8_offsets"
    return "int4_offsets" if has_offsets else "int4"


def _fake(x: torch.Tensor, weight: torch.Tensor, *others: object) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_LIBRARY.impl("panel_linear", panel_linear_reference, "CompositeExplicitAutograd")
_LIBRARY.impl("integer_panel_linear", integer_panel_linear_reference, "CompositeExplicitAutograd")
_LIBRARY.impl("rounded_panel_linear", rounded_panel_linear_reference, "CompositeExplicitAutograd")
for _name in ("panel_linear", "integer_panel_linear", "rounded_panel_linear"):
    torch.library.register_fake(f"mllm::{_name}", _fake, lib=_LIBRARY)
