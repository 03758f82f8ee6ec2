"""MXFP4, blocks of 32 four-bit floats that share a power of two: gpt-oss's experts, and compressed-tensors' linears."""

from __future__ import annotations

from typing import ClassVar

import torch

from mllm_compile.runtime.quantised.numbers import exponents, unpacked_e2m1
from mllm_compile.runtime.quantised.scheme import MXFP4, WeightScheme
from mllm_compile.runtime.weights.formats.base import (
    VALUES,
    Format,
    Numbers,
    Roles,
    Stored,
    Tensors,
    check_dims,
    check_dtype,
    check_shape,
    misfit,
)
from mllm_compile.runtime.weights.formats.settings import Settings


class Mxfp4(Format):
    """`_blocks` [E, N, G, 16] uint8 and `_scales` [E, N, G] uint8; the model has [E, K, N]."""

    name = "mxfp4"
    plain = ""
    roles: ClassVar[Roles] = {VALUES: "_blocks", "scales": "_scales"}
    values_dtypes = (torch.uint8,)
    transposed = True

    def layout(self, stored: Stored, settings: Settings, details: Numbers) -> tuple[tuple[int, ...], Numbers]:
        values, scales = stored[VALUES], stored["scales"]
        check_dims(values, 4)
        check_dtype(scales, torch.uint8, torch.float8_e8m0fnu)
        experts, outputs, groups, num_bytes = values.shape
        check_shape(values, (experts, outputs, groups, 16), scales)
        check_shape(scales, (experts, outputs, groups), values)
        return (experts, outputs, groups * num_bytes * 2), {}

    def rows(self, tensors: Tensors, numbers: Numbers, start: int, stop: int) -> torch.Tensor:
        scales = exponents(tensors["scales"][start:stop]).unsqueeze(-1)
        return unpacked_e2m1(tensors[VALUES][start:stop]).mul_(scales).flatten(-2)

    def scheme(self, stored: Stored, shape: tuple[int, ...], numbers: Numbers) -> WeightScheme | None:
        return MXFP4

    def kept_tensor(self, role: str, tensors: Tensors, numbers: Numbers) -> torch.Tensor:
        """They are the scheme's to the byte, except for a dimension of groups."""
        tensor = tensors[role]
        return tensor.flatten(-2) if role == VALUES else tensor.view(torch.uint8)


class CompressedMxfp4(Format):
    """compressed-tensors' `mxfp4-pack-quantized`: `weight_packed` [N, K/2] and `weight_scale` [N, K/32], both uint8."""

    name = "compressed-tensors mxfp4"
    plain = ".weight"
    roles: ClassVar[Roles] = {VALUES: ".weight_packed", "scales": ".weight_scale"}
    values_dtypes = (torch.uint8,)
    as_stored = frozenset({VALUES, "scales"})

    def layout(self, stored: Stored, settings: Settings, details: Numbers) -> tuple[tuple[int, ...], Numbers]:
        values, scales = stored[VALUES], stored["scales"]
        check_dims(values, 2)
        check_dtype(scales, torch.uint8)
        rows, columns = values.shape[0], values.shape[1] * 2
        if columns % MXFP4.group:
            raise misfit(values, scales, f"expected groups of {MXFP4.group} in {columns} inputs")
        check_shape(scales, (rows, columns // MXFP4.group), values)
        return (rows, columns), {}

    def rows(self, tensors: Tensors, numbers: Numbers, start: int, stop: int) -> torch.Tensor:
        values = unpacked_e2m1(tensors[VALUES][start:stop]).unflatten(-1, (-1, MXFP4.group))
        decoded: torch.Tensor = values.mul_(exponents(tensors["scales"][start:stop]).unsqueeze(-1)).flatten(-2)
        return decoded

    def scheme(self, stored: Stored, shape: tuple[int, ...], numbers: Numbers) -> WeightScheme | None:
        return MXFP4

    def kept_tensor(self, role: str, tensors: Tensors, numbers: Numbers) -> torch.Tensor:
        return tensors[role]
