"""compressed-tensors' `pack-quantized`: integers of four or eight bits, packed along the inputs."""

from __future__ import annotations

import struct
from typing import ClassVar

import torch

from mllm_compile.runtime.errors import CheckpointError
from mllm_compile.runtime.quantised.scheme import WeightScheme
from mllm_compile.runtime.weights.formats.base import (
    FLOATS,
    VALUES,
    Format,
    Numbers,
    ReadBytes,
    Roles,
    Stored,
    Tensors,
    check_dims,
    check_dtype,
    check_shape,
    group_size,
    lacks,
    misfit,
    of_groups,
    unpacked,
)
from mllm_compile.runtime.weights.formats.settings import Settings


class PackedInt(Format):
    """`weight_packed` [N, K·bits/32] int32, `weight_scale` [N, G], `weight_shape` [2] int64; asymmetric also
    `weight_zero_point` [N·bits/32, G] int32, and with `actorder: group` the group of each input, `weight_g_idx` [K].
    """

    name = "compressed-tensors packed integers"
    plain = ".weight"
    roles: ClassVar[Roles] = {
        VALUES: ".weight_packed",
        "scales": ".weight_scale",
        "shape": ".weight_shape",
        "zeros": ".weight_zero_point",
        "order": ".weight_g_idx",
    }
    optional = frozenset({"zeros", "order"})
    values_dtypes = (torch.int32,)

    def details(self, stored: Stored, read: ReadBytes) -> Numbers:
        shape = stored["shape"]
        _check_sizes(stored)
        rows, columns = struct.unpack("<2q" if shape.dtype == torch.int64 else "<2i", read(shape))
        if rows != stored[VALUES].shape[0] or columns < 1:
            raise misfit(shape, stored[VALUES], f"the former says [{rows}, {columns}]")
        return {"columns": columns}

    def layout(self, stored: Stored, settings: Settings, details: Numbers) -> tuple[tuple[int, ...], Numbers]:
        values, scales = stored[VALUES], stored["scales"]
        check_dtype(scales, *FLOATS)
        _check_sizes(stored)
        rows, columns = values.shape[0], int(details["columns"])
        bits = next((bits for bits in settings.bits if -(-columns * bits // 32) == values.shape[1]), None)
        if bits is None:
            raise misfit(values, stored["shape"], f"{columns} values of {_any(settings.bits)} bits have other words")
        check_dims(scales, 2)
        groups = scales.shape[1]
        check_shape(scales, (rows, groups), values)
        base = values.name.removesuffix(self.roles[VALUES])
        if zeros := stored.get("zeros"):
            check_dtype(zeros, torch.int32)
            check_shape(zeros, (-(-rows * bits // 32), groups), scales)
            if settings.symmetric:
                raise misfit(zeros, values, "the config says symmetric: true, which has no zero points")
        elif settings.symmetric is False:
            raise lacks(values, base + self.roles["zeros"], f"{self.name} have them with symmetric: false")
        if order := stored.get("order"):
            check_dtype(order, torch.int32)
            check_shape(order, (columns,), values)
        elif settings.is_ordered and groups > 1:
            raise lacks(values, base + self.roles["order"], f"{self.name} have them with actorder: group")
        group = columns if order else group_size(stored, settings.groups, columns, groups)
        return (rows, columns), {"rows": rows, "columns": columns, "bits": bits, "group": group}

    def rows(self, tensors: Tensors, numbers: Numbers, start: int, stop: int) -> torch.Tensor:
        num_rows, columns, bits, group = (int(numbers[name]) for name in ("rows", "columns", "bits", "group"))
        scales = tensors["scales"][start:stop]
        groups = tensors.get("order")
        if groups is None:
            groups = torch.arange(columns, device=scales.device) // group
        values = unpacked(tensors[VALUES][start:stop], bits, columns)
        if "zeros" in tensors:
            zeros = unpacked(tensors["zeros"].T.contiguous(), bits, num_rows)[:, start:stop].T
            values = values - of_groups(zeros, groups, 0)
        else:
            values = values - (1 << (bits - 1))
        return values.to(scales.dtype) * of_groups(scales, groups, float("nan"))

    def scheme(self, stored: Stored, shape: tuple[int, ...], numbers: Numbers) -> WeightScheme | None:
        if numbers["bits"] != 4 or "order" in stored:
            return None
        group = min(int(numbers["group"]), shape[1])
        return WeightScheme("int4", group, stored["scales"].dtype, has_zeros="zeros" in stored)

    def kept_tensor(self, role: str, tensors: Tensors, numbers: Numbers) -> torch.Tensor:
        """Words of eight numbers, the first in the lowest bits, are bytes of two in that order."""
        if role == VALUES:
            return tensors[VALUES].view(torch.uint8)[:, : -(-int(numbers["columns"]) // 2)]
        if role == "zeros":
            return unpacked(tensors["zeros"].T.contiguous(), 4, int(numbers["rows"])).T
        return tensors["scales"]


def _check_sizes(stored: Stored) -> None:
    check_dims(stored[VALUES], 2)
    check_dtype(stored["shape"], torch.int64, torch.int32)
    check_shape(stored["shape"], (2,), stored[VALUES])


def _any(numbers: tuple[int, ...]) -> str:
    if not numbers:
        raise CheckpointError("the config names no number of bits for weights that are packed")
    return " or ".join(map(str, numbers))
