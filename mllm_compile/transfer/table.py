"""prime-rl's table of tensors, `{dtype: [(name, torch.Size, numel)]}`, a pickle that is read by its opcodes."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from mllm_compile.errors import WeightUpdateError
from mllm_compile.transfer.opcodes import Made, Name, read_pickle

MOST_DIMS = 16
DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
    "uint8", "bool",
)  # fmt: skip
SIZE = Name("torch", "Size")


class Announced(NamedTuple):
    """A tensor that follows."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def read_table(data: bytes) -> list[tuple[str, list[Announced]]]:
    """The tensors of a table by dtype, in its order.

    Raises:
        WeightUpdateError: it is malformed, or holds anything but names, sizes and dtypes.
    """
    table = read_pickle(data, "the table", lambda name: name == SIZE or is_dtype(name))
    if not isinstance(table, dict):
        raise WeightUpdateError(f"the table is a {type(table).__name__}; expected a dict by dtype")
    found = []
    for dtype, rows in table.items():
        if not is_dtype(dtype) or not isinstance(rows, list):
            raise WeightUpdateError("the table has a key that is no dtype, or one without a list")
        found.append((dtype.name, [_announced(dtype.name, row) for row in rows]))
    return found


def is_dtype(name: Any) -> bool:
    """True for the name of a dtype of torch's that tensors may have."""
    return isinstance(name, Name) and name.module == "torch" and name.name in DTYPES


def shape_of(size: Any) -> tuple[int, ...] | None:
    """The numbers of a torch.Size; None if it is none."""
    if not isinstance(size, Made) or size.what != SIZE or len(size.arguments) != 1:
        return None
    (shape,) = size.arguments
    is_shape = isinstance(shape, tuple) and len(shape) <= MOST_DIMS and all(type(one) is int for one in shape)
    return shape if is_shape else None


def _announced(dtype: str, row: Any) -> Announced:
    name, size, count = row if isinstance(row, tuple) and len(row) == 3 else (None,) * 3
    shape = shape_of(size)
    if not isinstance(name, str) or shape is None:
        raise WeightUpdateError(
            f"the table has a row that is no (name, Size, numel) of a dtype; a Size is of up to {MOST_DIMS} numbers"
        )
    if type(count) is not int or any(one < 0 for one in shape) or count != prod(shape):
        raise WeightUpdateError(
            f"the table has {name[:200]!r} with sizes {shape}; expected none below 0, and a number of values that is "
            "their product"
        )
    return Announced(name, dtype, shape)
