"""Moves host arrays to the device without making the host wait for the work queued there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of `array` on `device`; the array may be changed as soon as this returns.

    A plain copy from pageable memory waits for the stream, and so for the step that runs there. This one goes through
    pinned memory of torch's caching host allocator, which does not hand the block out again before the copy is over.
    """
    source = torch.from_numpy(array)
    if device.type == "cuda":
        return source.pin_memory().to(device, non_blocking=True)
    return source.clone()


def upload_rows(parts: Sequence[np.ndarray], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A copy of arrays [n, W], one after another, on `device` in `dtype`; made on the host, by its threads."""
    count, is_cuda = sum(map(len, parts)), device.type == "cuda"
    rows = torch.empty(count, parts[0].shape[1], dtype=dtype, pin_memory=is_cuda)
    for part, target in zip(parts, rows.split([len(part) for part in parts]), strict=True):
        target.copy_(torch.from_numpy(part))
    return rows.to(device, non_blocking=True) if is_cuda else rows
