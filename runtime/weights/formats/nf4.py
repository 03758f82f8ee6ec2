"""bitsandbytes' nf4: four bits that stand for one of sixteen numbers, times the largest of each flat block."""

from __future__ import annotations

import struct
from typing import Any, ClassVar

import torch

from mllm_compile.runtime.errors import CheckpointError
from mllm_compile.runtime.files.json_data import parse_json
from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.runtime.weights.formats.base import (
    VALUES,
    Format,
    Numbers,
    ReadBytes,
    Roles,
    Stored,
    StoredTensor,
    Tensors,
    check_dtype,
    check_shape,
    misfit,
    not_negative,
)
from mllm_compile.runtime.weights.formats.settings import Settings

_MAX_STATE_BYTES = 4096
# The numbers that the values stand for, of QLoRA's appendix; of other tables only the roundings are theirs.
_NF4 = (
    *(-1.0, -0.69619280, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.07958030, 0.16093020, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0),
)
_NF4_TOLERANCE = 1e-3
_SIZES = ("rows", "columns", "block")


class Nf4(Format):
    """`weight` uint8, two values a byte, the high one first; blocks run over the flat tensor. With double quantisation
    the blocks' `absmax` are bytes themselves, with a table, a `nested_absmax` and an offset.
    """

    name = "bitsandbytes nf4"
    plain = ".weight"
    roles: ClassVar[Roles] = {
        VALUES: ".weight",
        "absmax": ".weight.absmax",
        "map": ".weight.quant_map",
        "state": ".weight.quant_state.bitsandbytes__nf4",
        "nested_absmax": ".weight.nested_absmax",
        "nested_map": ".weight.nested_quant_map",
    }
    optional = frozenset({"nested_absmax", "nested_map"})
    values_dtypes = (torch.uint8,)

    def details(self, stored: Stored, read: ReadBytes) -> Numbers:
        state, table = stored["state"], stored["map"]
        _check_small(stored)
        numbers = struct.unpack(f"<{len(_NF4)}f", read(table))
        if not all(abs(one - other) <= _NF4_TOLERANCE for one, other in zip(numbers, _NF4, strict=True)):
            raise CheckpointError(
                f"{table.file}: {table} does not hold nf4's numbers from -1 to 1. Download the checkpoint again."
            )
        try:
            said = parse_json(read(state))
            if said["quant_type"] != "nf4":
                raise ValueError(f"expected quant_type nf4, got {short_repr(said['quant_type'])}")
            rows, columns = (_size(size) for size in said["shape"])
            found = {"rows": rows, "columns": columns, "block": _size(said["blocksize"])}
            if "nested_absmax" not in stored:
                return found
            return found | {"nested_block": _size(said["nested_blocksize"]), "offset": float(said["nested_offset"])}
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{state.file}: {state} is not the state of a weight of two dimensions, as bitsandbytes writes it "
                f"({type(error).__name__}: {error})"
            ) from error

    def layout(self, stored: Stored, settings: Settings, details: Numbers) -> tuple[tuple[int, ...], Numbers]:
        values, absmax = stored[VALUES], stored["absmax"]
        rows, columns = int(details["rows"]), int(details["columns"])
        _check_small(stored)
        if values.num_bytes != -(-rows * columns // 2):
            raise misfit(values, stored["state"], f"expected half a byte for each of [{rows}, {columns}]")
        num_blocks = -(-rows * columns // int(details["block"]))
        check_shape(absmax, (num_blocks,), values)
        nested, table = stored.get("nested_absmax"), stored.get("nested_map")
        if nested is None or table is None:
            check_dtype(absmax, torch.float32)
            if other := nested or table:
                raise misfit(other, absmax, "double quantisation takes a nested absmax and its table")
            return (rows, columns), {name: details[name] for name in _SIZES}
        check_dtype(absmax, torch.uint8)
        check_dtype(nested, torch.float32)
        check_shape(nested, (-(-num_blocks // int(details["nested_block"])),), absmax)
        _check_table(table, 256)
        return (rows, columns), {name: details[name] for name in (*_SIZES, "nested_block", "offset")}

    def rows(self, tensors: Tensors, numbers: Numbers, start: int, stop: int) -> torch.Tensor:
        columns, block = int(numbers["columns"]), int(numbers["block"])
        first, last = start * columns, stop * columns
        absmax = tensors["absmax"]
        blocks = torch.arange(first // block, -(-last // block), device=absmax.device)
        scales = absmax.index_select(0, blocks)
        if "nested_absmax" not in tensors:
            scales = not_negative(scales)
        else:
            nested = not_negative(tensors["nested_absmax"].index_select(0, blocks // int(numbers["nested_block"])))
            scales = tensors["nested_map"][scales.int()] * nested + numbers["offset"]
        pairs = tensors[VALUES].flatten()[first // 2 : -(-last // 2)]
        values = tensors["map"][torch.stack((pairs >> 4, pairs & 15), -1).int()].flatten()[: last - first]
        skipped = first % block
        scales = scales.repeat_interleave(block)[skipped : skipped + last - first]
        decoded: torch.Tensor = values.mul_(scales).unflatten(0, (-1, columns))
        return decoded


def _check_small(stored: Stored) -> None:
    """Checks the tensors whose data `details` reads."""
    state = stored["state"]
    check_dtype(state, torch.uint8)
    if state.num_bytes > _MAX_STATE_BYTES:
        raise CheckpointError(f"{state.file}: {state}: expected at most {_MAX_STATE_BYTES} bytes of JSON")
    _check_table(stored["map"], len(_NF4))


def _check_table(table: StoredTensor, size: int) -> None:
    check_dtype(table, torch.float32)
    if table.shape != (size,):
        raise CheckpointError(f"{table.file}: {table}: expected {size} numbers")


def _size(value: Any) -> int:
    if type(value) is not int or not 0 < value < 2**40:
        raise ValueError(f"expected a size, got {value!r}")
    return value
