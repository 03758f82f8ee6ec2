"""The adapters of the rows that requests hold, on the device: captured steps read them by a request's row."""

from __future__ import annotations

import numpy as np
import torch

from mllm_compile.runtime.device.upload import upload

_UNKNOWN = -2  # no slot


class AdapterRows:
    """See the module's header.

    Attributes:
        slots: [rows] int32, each row's slot; -1: its request has no adapter, as padding's row 0.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.slots = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
        self._on_host = np.full(num_rows, -1, dtype=np.int32)

    def follow(self, rows: np.ndarray, slots: np.ndarray) -> None:
        """Brings the slots of a step's requests to the device, where they have changed.

        Args:
            rows, slots: [R] of any integers.
        """
        changed = self._on_host[rows] != slots
        if not changed.any():
            return
        rows, slots = rows[changed].astype(np.int64), slots[changed].astype(np.int32)
        self._on_host[rows] = slots
        device = self.slots.device
        self.slots.index_copy_(0, upload(rows, device), upload(slots, device))

    def write(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Takes slots [R] int32 of rows [R] int64 that are on the device already."""
        self.slots.index_copy_(0, rows, slots)
        self._on_host.fill(_UNKNOWN)
