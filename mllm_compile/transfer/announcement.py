"""Lists of tensors that a trainer announces: names, dtypes and shapes, checked ahead of any transfer."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from mllm_compile.errors import WeightUpdateError
from mllm_compile.transfer.table import DTYPES, MOST_DIMS, Announced

_MOST_TENSORS = 1 << 20
_MOST_BYTES = 1 << 44


class Announcement(NamedTuple):
    """Tensors that follow, in this order."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, names: Sequence[Any], dtypes: Sequence[Any], shapes: Sequence[Any]) -> Announcement:
        """
        Raises:
            WeightUpdateError: it is malformed.
        """
        if not len(names) == len(dtypes) == len(shapes):
            raise WeightUpdateError(
                f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes; expected one of each for a tensor"
            )
        if len(names) > _MOST_TENSORS:
            raise WeightUpdateError(f"{len(names):,} tensors are announced; expected at most {_MOST_TENSORS:,}")
        found = cls(tuple(names), tuple(dtype_of(dtype) for dtype in dtypes), tuple(tuple(shape) for shape in shapes))
        if twice := len(names) - len(set(names)):
            raise WeightUpdateError(f"{twice} tensors are announced twice; announce each once")
        if any(len(shape) > MOST_DIMS or min(shape, default=0) < 0 for shape in found.shapes) or (
            sum(found.sizes) > _MOST_BYTES
        ):
            raise WeightUpdateError(
                f"a shape is announced that no tensor has; expected up to {MOST_DIMS} sizes of at least 0, and "
                f"{_MOST_BYTES >> 40} TiB in all"
            )
        return found

    @classmethod
    def of_rows(cls, rows: Sequence[Announced]) -> Announcement:
        return cls.of(*([row[column] for row in rows] for column in range(3)))

    @property
    def sizes(self) -> list[int]:
        """Bytes of each."""
        return [prod(shape) * dtype.itemsize for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]


def dtype_of(name: Any) -> torch.dtype:
    """The dtype of a name such as bfloat16 or torch.bfloat16.

    Raises:
        WeightUpdateError: there is no such dtype.
    """
    bare = name.removeprefix("torch.") if isinstance(name, str) else name
    if bare not in DTYPES:
        raise WeightUpdateError(f"dtype {str(name)[:50]!r} is announced; expected {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, bare)
    return dtype
