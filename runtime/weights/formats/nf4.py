"""bitsandbytes' nf4: four bits that stand for one of sixteen numbers, times the largest of each flat block."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from mllm_compile.runtime.errors import CheckpointError
from mllm_compile.runtime.json_data import parse_json
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
)
from mllm_compile.runtime.weights.formats.settings import Settings

_MAX_STATE_BYTES = 4096


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
        state = stored["state"]
        check_dtype(state, torch.uint8)
        if state.num_bytes > _MAX_STATE_BYTES:
            raise CheckpointError(f"{state.file}: {state}: expected at most {_MAX_STATE_BYTES} bytes of JSON")
        try:
            said = parse_json(read(state))
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
        if values.num_bytes != -(-rows * columns // 2):
            raise misfit(values, stored["state"], f"expected half a byte for each of [{rows}, {columns}]")
        num_blocks = -(-rows * columns // int(details["block"]))
        check_shape(absmax, (num_blocks,), values)
        _check_table(stored["map"], 16)
        nested, table = stored.get("nested_absmax"), stored.get("nested_map")
        if nested is None or table is None:
            check_dtype(absmax, torch.float32)
            if other := nested or table:
                raise misfit(other, absmax, "double quantisation takes a nested absmax and its table")
            return (rows, columns), {}
        check_dtype(absmax, torch.uint8)
        check_dtype(nested, torch.float32)
        check_shape(nested, (-(-num_blocks // int(details["nested_block"])),), absmax)
        _check_table(table, 256)
        return (rows, columns), {}

    def rows(self, tensors: Tensors, numbers: Numbers, start: int, stop: int) -> torch.Tensor:
        columns, block = int(numbers["columns"]), int(numbers["block"])
        first, last = start * columns, stop * columns
        absmax = tensors["absmax"]
        blocks = torch.arange(first // block, -(-last // block), device=absmax.device)
        scales = absmax.index_select(0, blocks)
        if "nested_absmax" in tensors:
            nested = tensors["nested_absmax"].index_select(0, blocks // int(numbers["nested_block"]))
            scales = tensors["nested_map"][scales.int()] * nested + numbers["offset"]
        pairs = tensors[VALUES].flatten()[first // 2 : -(-last // 2)]
        values = tensors["map"][torch.stack((pairs >> 4, pairs & 15), -1).int()].flatten()[: last - first]
        skipped = first % block
        scales = scales.repeat_interleave(block)[skipped : skipped + last - first]
        return values.mul_(scales).unflatten(0, (-1, columns))


def _check_table(table: StoredTensor, size: int) -> None:
    check_dtype(table, torch.float32)
    if table.shape != (size,):
        raise CheckpointError(f"{table.file}: {table}: expected {size} numbers")


def _size(value: Any) -> int:
    if type(value) is not int or not 0 < value < 2**40:
        raise ValueError(f"expected a size, got {value!r}")
    return value
