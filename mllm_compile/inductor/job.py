"""One compile: a piece, its inputs, and where the package goes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The dynamic sizes of all pieces, and what the example inputs have there. Distinct and not special (0, 1, multiples of
# 8), so that the exporter does not take one for another or for a constant. T tokens (of decode attention: requests), S
# rows of logits, L KV slots to write, P slots of the KV cache; in decode attention N splits of a request's keys and W
# pages of a request; in the decode loop M rows of the largest captured decode, R rows and C columns of the table of
# slots; of layers with a state B requests, and R rows of the pool; B distances of a bias; F features of a tower, each
# of several patches, and G features that are put together of its.
EXAMPLE_SIZES = {"T": 37, "S": 5, "P": 1013, "N": 3, "W": 19, "L": 29, "M": 41, "R": 43, "C": 307, "B": 23} | {
    "F": 47,
    "G": 53,
}


@dataclass(frozen=True)
class PieceInput:
    """One input of a piece: sizes are numbers, or names of EXAMPLE_SIZES for the dynamic ones, or such a number times
    a name: "4*F"."""

    shape: tuple[int | str, ...]
    stride: tuple[int | str, ...]
    dtype: str

    @classmethod
    def contiguous(cls, shape: tuple[int | str, ...], dtype: str) -> PieceInput:
        strides: list[int | str] = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, _product(size, strides[0]))
        return cls(shape, tuple(strides), dtype)

    def of_one(self, name: str) -> PieceInput:
        """The same input where the size `name` is 1."""

        def fixed(size: int | str) -> int | str:
            if not isinstance(size, str) or name not in size.split("*"):
                return size
            return math.prod(int(factor) for factor in size.replace(name, "1").split("*"))

        return PieceInput(tuple(fixed(n) for n in self.shape), tuple(fixed(n) for n in self.stride), self.dtype)

    def to_json(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "stride": list(self.stride), "dtype": self.dtype}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PieceInput:
        return cls(tuple(data["shape"]), tuple(data["stride"]), data["dtype"])


def _product(first: int | str, second: int | str) -> int | str:
    if isinstance(first, int) and isinstance(second, int):
        return first * second
    return "*".join(str(factor) for factor in (first, second) if factor != 1)


@dataclass(frozen=True)
class PieceJob:
    """One piece to compile: its source, its inputs, and where the package goes."""

    piece: str
    source_path: Path
    inputs: tuple[PieceInput, ...]
    package_path: Path
