"""Host memory that copies to and from the device go through: pinned, made once, handed out in turn.

Allocating pinned memory for every step costs more host time than the copy. A buffer comes back after `NUM_BUFFERS - 1`
others; by then its last copy is over, or is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

# The engine has two steps in flight; a buffer is not in use any more when the next but two asks for it.
NUM_BUFFERS = 4
_MIN_BYTES = 4096


@dataclass(slots=True)
class StagingBuffer:
    """Memory of a copy that is or was being made.

    Attributes:
        memory: uint8, pinned where the device is a GPU.
        event: the end of the current stream's queue at the last `record`; None on a CPU.
    """

    memory: torch.Tensor
    event: torch.cuda.Event | None

    @property
    def array(self) -> np.ndarray:
        """The same memory as uint8."""
        return self.memory.numpy()

    def record(self) -> None:
        """Notes that all that uses the buffer is queued now."""
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        """Block until what was queued at the last `record` is over."""
        if self.event is not None:
            self.event.synchronize()  # at once when never recorded


class StagingRing:
    """Hands out buffers in turn; used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._buffers = [self._make(_MIN_BYTES) for _ in range(NUM_BUFFERS)]
        self._turn = 0

    def next(self, num_bytes: int) -> StagingBuffer:
        """The buffer that was used longest ago, with room for num_bytes; call `record` on it afterwards."""
        self._turn = (self._turn + 1) % NUM_BUFFERS
        buffer = self._buffers[self._turn]
        buffer.wait()
        if buffer.memory.nbytes < num_bytes:
            buffer = self._buffers[self._turn] = self._make(1 << (num_bytes - 1).bit_length())
        return buffer

    def _make(self, num_bytes: int) -> StagingBuffer:
        memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        return StagingBuffer(memory, torch.cuda.Event() if self._is_cuda else None)
