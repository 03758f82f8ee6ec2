"""Defines how the weight of a linear is in memory where it is quantised: its tensors, their shapes and types.

Shape legend: N outputs, K inputs, G groups of inputs that share a scale; E experts, whose weights all tensors have one
behind another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

# Roles of the tensors that one weight is.
VALUES, SCALES, ZEROS, FACTORS, OFFSETS = "values", "scales", "zeros", "factors", "offsets"
Kind = Literal["fp8", "int4", "int4_lanes", "int4_offsets", "int8", "int8_offsets", "mxfp4", "nvfp4"]

FP8_MAX = 448.0  # of float8_e4m3fn
SMALLEST_SCALE = 1e-12  # of a group of zeros: it is divided by
INT4_GROUP = 128  # inputs that share a scale, where no checkpoint says how many
INT4_ZERO = 8  # what stands for zero where no zero points are stored
_WHOLE_BYTES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int8_offsets": torch.uint8}  # kind → a value's type


@dataclass(frozen=True)
class WeightScheme:
    """The form of a weight [N, K], or of experts' [E, N, K]; every scale is of one row, whatever blocks a checkpoint
    has, so that rows of several weights can be packed into one.

    fp8: values [N, K] float8_e4m3fn, weight = value * scale. int4: values [N, K/2 rounded up] uint8, two a byte, the
    low one first; weight = (value - zero) * scale, zero being 8 where there are no zero points. int4_lanes: the same,
    of a linear, with the values of each 32 inputs in another order (numbers.in_lanes). mxfp4: as int4, but with floats
    of four bits (E2M1); 32 inputs have a scale, a power of two in a byte (E8M0). nvfp4: the same floats; 16 inputs have
    a scale in float8_e4m3fn, and each row a factor [N, 1] in float32. int8: values [N, K] int8, weight = value * scale.
    int4_offsets and int8_offsets: values as of int4, or [N, K] uint8; weight = value * scale + offset.

    Attributes:
        kind: what a value is.
        group: inputs that share a scale; K, where one scale is for a whole row, also of a rank's part of its inputs.
        scale_dtype: of the scales [N, G], and of offsets [N, G].
        has_zeros: zero points [N, G] uint8 are stored.
    """

    kind: Kind
    group: int
    scale_dtype: torch.dtype = torch.float32
    has_zeros: bool = False

    @property
    def name(self) -> str:
        """The kind, in whatever order values are, and whatever stands beside them."""
        return self.kind.partition("_")[0]

    @property
    def roles(self) -> tuple[str, ...]:
        has_third = self.has_zeros or third_role(self.kind) != ZEROS
        return (VALUES, SCALES, third_role(self.kind)) if has_third else (VALUES, SCALES)

    def shape(self, role: str, *sizes: int) -> tuple[int, ...]:
        """The shape of one tensor of a weight of these sizes; the last one is its inputs."""
        *others, columns = sizes
        if role == VALUES:
            return *others, columns if self.kind in _WHOLE_BYTES else -(-columns // 2)
        if role == FACTORS:
            return *others, 1
        return *others, -(-columns // self.group)

    def stretch(self, role: str, start: int, length: int) -> tuple[int, int]:
        """Where what is of the inputs [start, start + length) is along dimension 1 of one tensor: (start, length).

        The inputs are whole bytes, and whole groups or of one group.
        """
        if role == FACTORS:
            return 0, 1
        unit = self.group if role != VALUES else 1 if self.kind in _WHOLE_BYTES else 2
        first = start // unit
        return first, -(-(start + length) // unit) - first

    def dtype(self, role: str) -> torch.dtype:
        if role in (SCALES, OFFSETS):
            return self.scale_dtype
        if role == FACTORS:
            return torch.float32
        return _WHOLE_BYTES.get(self.kind, torch.uint8) if role == VALUES else torch.uint8

    def of_linear(self, columns: int) -> WeightScheme:
        """The scheme of a linear of so many inputs whose weight has this one in a checkpoint. Values have the order of
        kernels for few tokens, if these may take it."""
        in_lanes = self.kind == "int4" and self.group == INT4_GROUP and columns % INT4_GROUP == 0
        return replace(self, kind="int4_lanes") if in_lanes else self

    def num_bytes(self, *sizes: int) -> int:
        """The bytes of all tensors of a weight of these sizes."""
        return sum(math.prod(self.shape(role, *sizes)) * self.dtype(role).itemsize for role in self.roles)


MXFP4 = WeightScheme("mxfp4", 32, torch.uint8)
NVFP4 = WeightScheme("nvfp4", 16, torch.float8_e4m3fn)


def third_role(kind: str) -> str:
    """The role of what a weight of this kind may have beside values and scales; ops take either in one place."""
    if kind == "nvfp4":
        return FACTORS
    return OFFSETS if kind.endswith("_offsets") else ZEROS


def quantised_as(kind: Kind, columns: int) -> WeightScheme:
    """The scheme that a plain weight of so many inputs is quantised to."""
    if kind in ("mxfp4", "nvfp4"):
        return MXFP4 if kind == "mxfp4" else NVFP4
    if kind in ("fp8", "int8"):
        return WeightScheme(kind, columns)
    group = min(INT4_GROUP, columns)
    if columns % group:  # kernels take groups that divide the inputs
        group = next((size for size in (64, 32) if columns % size == 0), group)
    return WeightScheme("int4", group, torch.bfloat16)


def tensor_name(weight: str, role: str) -> str:
    """The name of one tensor of a weight: the values have the weight's own."""
    return weight if role == VALUES else f"{weight}_{role}"
