"""An arena without a GPU: memory that was given back holds NaN, so that a read of it is seen."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from mllm_compile.runtime.cuda.chunks import Chunks
from mllm_compile.runtime.device.arena import Arena
from mllm_compile.runtime.errors import DeviceMemoryError

_POISON = 0xFF  # NaN in every floating type


class LostMemory:
    """A stretch of host memory whose bytes are lost when it is unmapped."""

    def __init__(self, num_bytes: int, machine: Machine) -> None:
        self.num_bytes, self._machine = num_bytes, machine
        self._bytes = torch.full((num_bytes,), _POISON, dtype=torch.uint8)
        self._copy: torch.Tensor | None = None
        self._is_mapped = False
        machine.stretches.append(self)
        self.map()

    @property
    def copy_bytes(self) -> int:
        return 0 if self._copy is None else self.num_bytes

    def tensor(self) -> torch.Tensor:
        return self._bytes

    def map(self, *, restores: bool = False, chunks: Chunks | None = None) -> None:
        if self._is_mapped:
            return
        chunk = None if chunks is None else chunks.take()
        if chunk is not None:
            os.close(chunk)
            self._machine.num_handed_over += 1
        if self._machine.taken + self.num_bytes > self._machine.size:
            raise DeviceMemoryError("the machine of a test is full")
        self._is_mapped = True
        self._machine.taken += self.num_bytes
        self._machine.num_maps += 1
        if restores:
            self._bytes.copy_(self._copy)

    def unmap(self, chunks: Chunks | None = None) -> None:
        if self._is_mapped:
            if chunks is not None:
                chunks.add(os.open(os.devnull, os.O_RDONLY))
            self._is_mapped = False
            self._bytes.fill_(_POISON)
            self._machine.taken -= self.num_bytes

    def fill_zeros(self) -> None:
        self._bytes.zero_()

    def pin_copy(self) -> None:
        if self._machine.is_host_full:
            raise DeviceMemoryError("the host of a test is full")
        if self._copy is None:
            self._copy = torch.empty_like(self._bytes)

    def save(self) -> None:
        self.pin_copy()
        assert self._is_mapped
        self._copy.copy_(self._bytes)
        self._machine.num_saves += 1


@dataclass
class Machine:
    """A device's memory, as the driver counts it.

    Attributes:
        size, taken: in bytes.
        num_maps, num_saves: how often a stretch was mapped, and copied to the host.
        num_handed_over: how often one was mapped to a chunk of another.
    """

    size: int = 1 << 40
    taken: int = 0
    is_host_full: bool = False
    num_maps: int = 0
    num_saves: int = 0
    num_handed_over: int = 0
    stretches: list[LostMemory] = field(default_factory=list)

    def arena(self) -> Arena:
        return Arena(lambda num_bytes: LostMemory(num_bytes, self))
