"""Moves host arrays to the device without making the host wait for the work queued there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_PART_BYTES = 4 << 20  # of rows, on the device


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of `array` on `device`; the array may be changed as soon as this returns.

    A plain copy from pageable memory waits for the stream, and so for the step that runs there. This one goes through
    pinned memory of torch's caching host allocator, which does not hand the block out again before the copy is over.
    """
    source = torch.from_numpy(array)
    if device.type == "cuda":
        return source.pin_memory().to(device, non_blocking=True)
    return source.clone()


class RowUploads:
    """Brings arrays of rows to the device beside the work that is queued there, by a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, arrays: Sequence[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
        """A copy of arrays [n, W], one after another, on the device in `dtype`; the arrays may be changed as soon as
        this returns.

        Made on the host, by its threads, a part after the other: each is on its way while the next one is made. The
        current stream waits for all, the host for none.
        """
        count, width = sum(map(len, arrays)), arrays[0].shape[1]
        if self._stream is None:
            return torch.cat([torch.from_numpy(array).to(dtype) for array in arrays])
        with torch.cuda.stream(self._stream):  # memory is this stream's, so that it need not wait for another's work
            rows = torch.empty(count, width, dtype=dtype, device=self._device)
            step, start = max(1, _PART_BYTES // (width * dtype.itemsize)), 0
            for array in arrays:
                for part in torch.from_numpy(array).split(step):
                    staged = torch.empty(part.shape, dtype=dtype, pin_memory=True)
                    staged.copy_(part)
                    rows[start : start + len(part)].copy_(staged, non_blocking=True)
                    start += len(part)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        rows.record_stream(current)
        return rows
