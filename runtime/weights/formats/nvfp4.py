"""NVFP4: sixteen four-bit floats share a scale of eight bits, and a weight a scale of 32."""

from __future__ import annotations

from typing import ClassVar

import torch

from mllm_compile.runtime.quantised.numbers import unpacked_e2m1
from mllm_compile.runtime.quantised.scheme import FACTORS, NVFP4, WeightScheme
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
    not_negative,
    positive,
)
from mllm_compile.runtime.weights.formats.settings import Settings

_GROUP = 16


class ModelOptNvfp4(Format):
    """`weight` [N, K/2] uint8, `weight_scale` [N, K/16] e4m3 and `weight_scale_2` float32, as ModelOpt has them."""

    name = "modelopt nvfp4"
    plain = ".weight"
    roles: ClassVar[Roles] = {VALUES: ".weight", "scales": ".weight_scale", "global": ".weight_scale_2"}
    values_dtypes = (torch.uint8,)
    as_stored = frozenset({VALUES, "scales"})
    is_divisor: ClassVar[bool] = False

    def layout(self, stored: Stored, settings: Settings, details: Numbers) -> tuple[tuple[int, ...], Numbers]:
        values, scales, of_all = stored[VALUES], stored["scales"], stored["global"]
        check_dims(values, 2)
        check_dtype(scales, torch.float8_e4m3fn)
        check_dtype(of_all, torch.float32)
        rows, columns = values.shape[0], values.shape[1] * 2
        if columns % _GROUP:
            raise misfit(values, scales, f"expected groups of {_GROUP} in {columns} inputs")
        check_shape(scales, (rows, columns // _GROUP), values)
        if of_all.shape not in ((), (1,)):
            raise misfit(of_all, values, "expected one number of the former")
        return (rows, columns), {"rows": rows}

    def rows(self, tensors: Tensors, numbers: Numbers, start: int, stop: int) -> torch.Tensor:
        scales, of_all = not_negative(tensors["scales"][start:stop].float()), positive(tensors["global"])
        scales = scales / of_all if self.is_divisor else scales * of_all
        values = unpacked_e2m1(tensors[VALUES][start:stop]).unflatten(-1, (-1, _GROUP))
        decoded: torch.Tensor = values.mul_(scales.unsqueeze(-1)).flatten(-2)
        return decoded

    def scheme(self, stored: Stored, shape: tuple[int, ...], numbers: Numbers) -> WeightScheme | None:
        return NVFP4

    def sources(self, role: str) -> tuple[str, ...]:
        return ("global",) if role == FACTORS else (role,)

    def kept_tensor(self, role: str, tensors: Tensors, numbers: Numbers) -> torch.Tensor:
        """The scale of the whole weight becomes a factor of each row, which are as many."""
        if role != FACTORS:
            return tensors[role]
        factor = positive(tensors["global"]).reshape(1, 1)
        return (1 / factor if self.is_divisor else factor).expand(int(numbers["rows"]), 1)


class CompressedNvfp4(ModelOptNvfp4):
    """The same as compressed-tensors has it, where the scale of all is divided by."""

    name = "compressed-tensors nvfp4"
    roles: ClassVar[Roles] = {
        VALUES: ".weight_packed",
        "scales": ".weight_scale",
        "global": ".weight_global_scale",
    }
    is_divisor = True
