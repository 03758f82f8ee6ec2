"""The arrays of a step, brought to the device by one copy: packed one after another, each where it can be viewed in its
dtype."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from mllm_compile.runtime.device.staging import StagingRing
from mllm_compile.runtime.step_fields import DTYPES

_ALIGNMENT = 16  # bytes
_NUMPY = {torch.int32: np.int32, torch.int64: np.int64}


class FieldLayout:
    """The offsets of a step's arrays in a block of bytes.

    Attributes:
        end: bytes up to the end of the last one.
    """

    def __init__(self, sizes: Mapping[str, int], start: int = 0) -> None:
        """
        Args:
            sizes: elements by name, one of StepFields, which says the dtype.
            start: bytes to leave free ahead of the first one.
        """
        self._places: dict[str, tuple[int, int, torch.dtype]] = {}
        self.end = start
        for name, size in sizes.items():
            dtype: torch.dtype = getattr(torch, DTYPES[name])
            # Compiled pieces copy an array that begins elsewhere, and write into the copy.
            begin = -(-self.end // _ALIGNMENT) * _ALIGNMENT
            self.end = begin + size * dtype.itemsize
            self._places[name] = (begin, self.end, dtype)

    def write(self, fields: Mapping[str, np.ndarray], block: np.ndarray) -> None:
        """Put the arrays, of these sizes, into a block [≥ end] uint8."""
        for name, (begin, end, dtype) in self._places.items():
            block[begin:end].view(_NUMPY[dtype])[:] = fields[name]

    def views(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arrays in a block [≥ end] uint8, by name."""
        return {name: block[begin:end].view(dtype) for name, (begin, end, dtype) in self._places.items()}


def layout_of(fields: Mapping[str, np.ndarray], start: int = 0) -> FieldLayout:
    """The layout that these arrays just fit."""
    return FieldLayout({name: array.size for name, array in fields.items()}, start)


def upload_fields(fields: Mapping[str, np.ndarray], ring: StagingRing, device: torch.device) -> dict[str, torch.Tensor]:
    """Copies of the arrays on the device, by one copy from pinned memory, without waiting."""
    layout = layout_of(fields)
    buffer = ring.next(layout.end)
    layout.write(fields, buffer.array)
    block = torch.empty(layout.end, dtype=torch.uint8, device=device)
    block.copy_(buffer.memory[: layout.end], non_blocking=True)
    buffer.record()
    return layout.views(block)
