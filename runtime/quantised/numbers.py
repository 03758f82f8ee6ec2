"""Quantises a weight by rounding to the nearest, and dequantises it: the meaning of a scheme, in plain torch.

Shape legend: N outputs, K inputs, G groups of inputs; E experts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from mllm_compile.runtime.quantised.scheme import (
    FACTORS,
    FP8_MAX,
    INT4_ZERO,
    OFFSETS,
    SCALES,
    SMALLEST_SCALE,
    VALUES,
    ZEROS,
    WeightScheme,
    third_role,
)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT8_MAX = 127
E8M0_BIAS, E8M0_NAN = 127, 255
_MOST_VALUES = 4 << 20  # computed at once: bounds what that takes beside the weight


def quantised(weight: torch.Tensor, scheme: WeightScheme) -> dict[str, torch.Tensor]:
    """The tensors of `weight` [N, K], or [E, N, K], by role. One with NaN or inf gets scales that are not finite."""
    if weight.dim() > 2:
        flat = quantised(weight.flatten(0, -2), scheme)
        return {role: tensor.unflatten(0, weight.shape[:-1]) for role, tensor in flat.items()}
    rows, columns = weight.shape
    missing = -columns % scheme.group
    groups = (functional.pad(weight, (0, missing)) if missing else weight).unflatten(1, (-1, scheme.group))
    sizes = groups.abs().amax(-1).float()  # sizes and quotients need no copy in float32 beside the weight
    if scheme.kind in ("fp8", "int8"):
        largest = FP8_MAX if scheme.kind == "fp8" else INT8_MAX
        scales = _scales(sizes, largest, scheme)
        scaled = groups / scales.float().unsqueeze(-1)
        if scheme.kind == "int8":
            scaled.round_()
        if scheme.scale_dtype != torch.float32:  # in float32 a quotient rounds to it
            scaled.clamp_(-largest, largest)
        return {VALUES: scaled.view(rows, -1)[:, :columns].to(scheme.dtype(VALUES)), SCALES: scales}
    groups = groups.float()
    if third_role(scheme.kind) == OFFSETS:
        return _with_offsets(groups, columns, scheme)
    if scheme.kind == "mxfp4":
        parts, powers = torch.frexp(sizes * (1 / E2M1[7]))
        powers = torch.where(parts == 0.5, powers - 1, powers).clamp(-E8M0_BIAS, E8M0_BIAS)
        codes = _e2m1_codes(torch.ldexp(groups, -powers.unsqueeze(-1))).view(rows, -1)[:, :columns]
        scales = torch.where(sizes.isfinite(), powers + E8M0_BIAS, E8M0_NAN).to(torch.uint8)
        return {VALUES: paired(codes), SCALES: scales}
    if scheme.kind == "nvfp4":
        sizes = sizes * (1 / E2M1[7])
        factors = (sizes.amax(-1, True) * (1 / FP8_MAX)).clamp(min=SMALLEST_SCALE)
        scales = (sizes / factors).clamp(max=FP8_MAX).to(scheme.scale_dtype)
        by = (scales.float() * factors).clamp(min=SMALLEST_SCALE)
        codes = _e2m1_codes(groups / by.unsqueeze(-1)).view(rows, -1)[:, :columns]
        return {VALUES: paired(codes), SCALES: scales, FACTORS: factors}
    found = {}
    if scheme.has_zeros:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = _scales(high - low, 15, scheme)
        zeros = (-low / scales.float()).round().clamp(0, 15)
        found[ZEROS] = zeros.to(torch.uint8)
    else:
        scales = _scales(sizes, 7.5, scheme)
        zeros = torch.full_like(scales, INT4_ZERO, dtype=torch.float32)
    numbers = (groups / scales.float().unsqueeze(-1)).round_() + zeros.unsqueeze(-1)
    numbers = numbers.clamp_(0, 15).view(rows, -1)[:, :columns].to(torch.uint8)
    values = paired(numbers)
    return {VALUES: in_lanes(values) if scheme.kind == "int4_lanes" else values, SCALES: scales, **found}


def _with_offsets(groups: torch.Tensor, columns: int, scheme: WeightScheme) -> dict[str, torch.Tensor]:
    """The tensors of a weight of groups [N, G, group]: its smallest number is a group's offset."""
    largest = 15 if scheme.name == "int4" else 255
    offsets = groups.amin(-1).to(scheme.scale_dtype)
    scales = _scales(groups.amax(-1) - groups.amin(-1), largest, scheme)
    numbers = ((groups - offsets.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)).round_().clamp_(0, largest)
    values = numbers.flatten(1)[:, :columns].to(torch.uint8)
    return {VALUES: paired(values) if scheme.name == "int4" else values, SCALES: scales, OFFSETS: offsets}


def _scales(sizes: torch.Tensor, largest: float, scheme: WeightScheme) -> torch.Tensor:
    # A GPU divides by a number by multiplying with its reciprocal: so the scales are the same everywhere.
    return (sizes * (1 / largest)).clamp(min=SMALLEST_SCALE).to(scheme.scale_dtype)


def _e2m1_codes(numbers: torch.Tensor) -> torch.Tensor:
    """uint8 of the nearest floats of four bits."""
    sizes = torch.tensor(E2M1[:8], device=numbers.device)
    codes = torch.bucketize(numbers.abs().contiguous(), (sizes[1:] + sizes[:-1]) / 2).to(torch.uint8)
    return codes | (numbers.signbit().to(torch.uint8) << 3)


def unpacked_e2m1(pairs: torch.Tensor) -> torch.Tensor:
    """[..., 2 B] float32 of [..., B] uint8: two four-bit floats a byte, the low one first."""
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2).int()
    # Not by a table, which would be copied from the host: not while a graph is captured.
    powers, last = codes >> 1 & 3, codes & 1
    sizes = torch.ldexp((last + 2 * (powers > 0)).float(), powers.clamp(min=1) - 2)
    return torch.where(codes > 7, -sizes, sizes)


def exponents(scales: torch.Tensor) -> torch.Tensor:
    """float32 of scales of any type; bytes are powers of two (E8M0)."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()


def paired(numbers: torch.Tensor) -> torch.Tensor:
    """[N, K/2 rounded up] uint8 of four-bit numbers [N, K] uint8, the low one of a byte first."""
    if numbers.shape[1] % 2:
        numbers = functional.pad(numbers, (0, 1))
    pairs = numbers.contiguous().view(torch.int16)  # the high byte has the second number
    return (pairs | pairs >> 4).to(torch.uint8)


def in_lanes(values: torch.Tensor) -> torch.Tensor:
    """The values of int4 [N, K/2] uint8 in the order of int4_lanes; K is a multiple of 32.

    Four lanes of a warp divide 32 inputs: each gives four pairs of neighbours to two products of 16. To either, lane q
    gives inputs 2 q and 2 q + 8, each with the next one. A lane gives one word: two bytes of its first inputs, then two
    of the inputs behind them, one a product; its low number is of the product's first eight inputs.
    """
    found = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    step = max(4 * _MOST_VALUES // max(2 * values.shape[1], 1), 1)  # a byte each, not four
    for start in range(0, values.shape[0], step):
        rows = values[start : start + step]
        of_inputs = (one.unflatten(-1, (-1, 2, 2, 4)) for one in (rows & 15, rows >> 4))  # product, eight, lane
        first, behind = (one[..., 0, :] | one[..., 1, :] << 4 for one in of_inputs)
        found[start : start + step] = torch.stack((first, behind), -1).movedim(-3, -1).flatten(-4)
    return found


def integers(values: torch.Tensor, kind: str) -> torch.Tensor:
    """[N, K] of the values of int4, or one more, in whatever order they are, and of int8."""
    if kind.startswith("int8"):
        return values
    if kind != "int4_lanes":
        return torch.stack((values & 15, values >> 4), -1).flatten(-2)
    lanes = values.unflatten(-1, (-1, 4, 2, 2))  # lane, first or behind, product
    return torch.stack((lanes & 15, lanes >> 4), -1).movedim((-2, -1), (-4, -3)).flatten(-5)


def dequantised(
    tensors: Mapping[str, torch.Tensor | None], kind: str, group: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """The weight [N, K], or [E, N, K], that `tensors`, by role, stand for: multiplied in float32 and rounded once."""
    values, scales, third = tensors[VALUES], tensors[SCALES], tensors.get(third_role(kind))
    assert values is not None and scales is not None, "a weight has values and scales"
    if values.dim() > 2:
        flat = {role: None if one is None else one.flatten(0, -2) for role, one in tensors.items()}
        numbers: torch.Tensor = dequantised(flat, kind, group, columns, dtype).unflatten(0, values.shape[:-1])
        return numbers
    weight = torch.empty(values.shape[0], columns, dtype=dtype, device=values.device)
    step = max(_MOST_VALUES // max(columns, 1), 1)
    for start in range(0, values.shape[0], step):
        rows = slice(start, start + step)
        of_groups = exponents(scales[rows])
        if kind == "nvfp4" and third is not None:
            of_groups = of_groups * third[rows]
        factors = _of_inputs(of_groups, group, columns)
        if kind == "fp8":
            weight[rows] = values[rows].float().mul_(factors)
            continue
        if kind in ("mxfp4", "nvfp4"):
            weight[rows] = unpacked_e2m1(values[rows])[:, :columns].mul_(factors)
            continue
        numbers = integers(values[rows], kind)[:, :columns].float()
        if kind == "int8":
            weight[rows] = numbers.mul_(factors)
            continue
        if third is not None and third_role(kind) == OFFSETS:
            weight[rows] = numbers.mul_(factors).add_(_of_inputs(third[rows].float(), group, columns))
            continue
        numbers -= INT4_ZERO if third is None else _of_inputs(third[rows].float(), group, columns)
        weight[rows] = numbers.mul_(factors)
    return weight


def _of_inputs(of_groups: torch.Tensor, group: int, columns: int) -> torch.Tensor:
    """[n, K] of [n, G]; [n, 1] where all inputs share one."""
    if of_groups.shape[1] == 1:
        return of_groups
    return of_groups.repeat_interleave(group, 1)[:, :columns]
