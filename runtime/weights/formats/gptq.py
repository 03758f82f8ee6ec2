"""GPTQ and AWQ: unsigned integers with a zero point for each group of inputs, packed the other way round."""

from __future__ import annotations

from typing import ClassVar

import torch

from mllm_compile.runtime.quantised.numbers import paired
from mllm_compile.runtime.quantised.scheme import WeightScheme
from mllm_compile.runtime.weights.formats.base import (
    FLOATS,
    VALUES,
    Format,
    Numbers,
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

_MOST_VALUES = 4 << 20  # taken out of their words at once


class Gptq(Format):
    """`qweight` [K·bits/32, N] int32, packed along the inputs; `qzeros` [G, N·bits/32] int32; `scales` [G, N]; and
    `g_idx` [K] int32, the group of each input, which with `desc_act` is no order.

    Version 1 stores a zero point less one, within its bits.
    """

    name = "gptq"
    plain = ".weight"
    roles: ClassVar[Roles] = {
        VALUES: ".qweight",
        "zeros": ".qzeros",
        "scales": ".scales",
        "order": ".g_idx",
    }
    optional = frozenset({"order"})
    values_dtypes = (torch.int32,)

    def layout(self, stored: Stored, settings: Settings, details: Numbers) -> tuple[tuple[int, ...], Numbers]:
        values, zeros, scales, order = stored[VALUES], stored["zeros"], stored["scales"], stored.get("order")
        check_dims(values, 2)
        check_dims(scales, 2)
        check_dtype(scales, *FLOATS)
        check_dtype(zeros, torch.int32)
        outputs = values.shape[1]
        bits, inputs = settings.bits[0], values.shape[0] * 32 // settings.bits[0]
        if order is not None:
            check_dtype(order, torch.int32)
            check_dims(order, 1)
            if not 0 <= inputs - order.shape[0] < 32 // bits:
                raise misfit(order, values, f"expected a group for each of {inputs} inputs of {bits} bits")
            inputs = order.shape[0]
        groups = scales.shape[0]
        check_shape(scales, (groups, outputs), values)
        check_shape(zeros, (groups, -(-outputs * bits // 32)), scales)
        if order is None and settings.is_ordered and groups > 1:
            name = values.name.removesuffix(self.roles[VALUES]) + self.roles["order"]
            raise lacks(values, name, f"{self.name} has them with desc_act: true")
        in_order = order is None or settings.in_order
        group = group_size(stored, settings.groups, inputs, groups) if in_order else inputs
        numbers = {"bits": bits, "group": group, "zero_offset": settings.zero_offset, "rows": outputs}
        numbers["in_order"] = int(in_order)
        return (outputs, inputs), numbers | {"columns": inputs}

    def rows(self, tensors: Tensors, numbers: Numbers, start: int, stop: int) -> torch.Tensor:
        names = ("bits", "group", "zero_offset", "rows", "columns")
        bits, group, offset, num_rows, columns = (int(numbers[name]) for name in names)
        order = tensors.get("order")
        groups = torch.arange(columns, device=tensors[VALUES].device) // group
        if order is not None:
            groups = torch.where(order == groups, groups, -1) if numbers["in_order"] else order
        values = unpacked(tensors[VALUES][:, start:stop].T.contiguous(), bits, columns)
        zeros = unpacked(tensors["zeros"], bits, num_rows)[:, start:stop].T
        zeros = (zeros + offset) & ((1 << bits) - 1)
        scales = tensors["scales"][:, start:stop].T
        values = values - of_groups(zeros, groups, 0)
        return values.to(scales.dtype) * of_groups(scales, groups, float("nan"))

    def scheme(self, stored: Stored, shape: tuple[int, ...], numbers: Numbers) -> WeightScheme | None:
        if numbers["bits"] != 4 or not numbers["in_order"]:
            return None
        return WeightScheme("int4", min(int(numbers["group"]), shape[1]), stored["scales"].dtype, has_zeros=True)

    def sources(self, role: str) -> tuple[str, ...]:
        return ("scales", "order") if role == "scales" else (role,)

    def kept_tensor(self, role: str, tensors: Tensors, numbers: Numbers) -> torch.Tensor:
        """Words of eight numbers, the first in the lowest bits, are bytes of two in that order."""
        columns = int(numbers["columns"])
        if role == VALUES:
            return tensors[VALUES].T.contiguous().view(torch.uint8)[:, : -(-columns // 2)]
        if role == "zeros":
            return ((unpacked(tensors["zeros"], 4, int(numbers["rows"])) + int(numbers["zero_offset"])) & 15).T
        scales, order = tensors["scales"].T, tensors.get("order")
        if order is None:
            return scales
        in_order = torch.arange(columns, device=order.device) // int(numbers["group"])
        return torch.where((order == in_order).all(), scales, float("nan"))


class Awq(Format):
    """`qweight` [K, N/8] int32, packed along the outputs; `qzeros` [G, N/8] int32; `scales` [G, N].

    Of eight outputs a word holds the even ones first, then the odd ones (AutoAWQ's `gemm`).
    """

    name = "awq"
    plain = ".weight"
    roles: ClassVar[Roles] = {VALUES: ".qweight", "zeros": ".qzeros", "scales": ".scales"}
    values_dtypes = (torch.int32,)

    def layout(self, stored: Stored, settings: Settings, details: Numbers) -> tuple[tuple[int, ...], Numbers]:
        values, zeros, scales = stored[VALUES], stored["zeros"], stored["scales"]
        check_dims(values, 2)
        check_dims(scales, 2)
        check_dtype(scales, *FLOATS)
        check_dtype(zeros, torch.int32)
        inputs, words = values.shape
        groups = scales.shape[0]
        check_shape(scales, (groups, words * 8), values)
        check_shape(zeros, (groups, words), scales)
        group = group_size(stored, settings.groups, inputs, groups)
        return (words * 8, inputs), {"group": group}

    def rows(self, tensors: Tensors, numbers: Numbers, start: int, stop: int) -> torch.Tensor:
        inputs = tensors[VALUES].shape[0]
        groups = torch.arange(inputs, device=tensors[VALUES].device) // int(numbers["group"])
        words = slice(start // 8, -(-stop // 8))
        values, zeros = (_in_order(tensors[role][:, words]) for role in (VALUES, "zeros"))
        scales = tensors["scales"][:, start:stop].T
        values = values.T - of_groups(zeros.T, groups, 0)
        return values.to(scales.dtype) * of_groups(scales, groups, float("nan"))

    def scheme(self, stored: Stored, shape: tuple[int, ...], numbers: Numbers) -> WeightScheme | None:
        return WeightScheme("int4", min(int(numbers["group"]), shape[1]), stored["scales"].dtype, has_zeros=True)

    def kept_tensor(self, role: str, tensors: Tensors, numbers: Numbers) -> torch.Tensor:
        stored = tensors[role]
        if role == "scales":
            return stored.T
        if role == "zeros":
            return _in_order(stored).T
        inputs, num_words = stored.shape
        values = torch.empty(8 * num_words, -(-inputs // 2), dtype=torch.uint8, device=stored.device)
        step = max(_MOST_VALUES // (8 * max(inputs, 1)), 1)
        for start in range(0, num_words, step):
            words = stored[:, start : start + step]
            values[8 * start : 8 * (start + step)] = paired(_in_order(words).T.to(torch.uint8))
        return values


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """[K, 8 W] int32 of [K, W] words: a word's even columns are its first four values, the odd ones its last."""
    values = unpacked(words.contiguous(), 4, 8 * words.shape[1])
    in_order: torch.Tensor = values.unflatten(-1, (-1, 2, 4)).transpose(-1, -2).flatten(-3)
    return in_order
