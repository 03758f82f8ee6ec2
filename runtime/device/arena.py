"""Memory of tensors that is given back and taken anew while the tensors stay, at their addresses.

Weights and KV caches are in arenas where runtime.enable_sleep_mode asks for it. All else is torch's: constants,
workspaces of libraries, graphs, buffers that NCCL may have registered. A CPU has no arenas.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch

from mllm_compile.runtime.cuda.chunks import Chunks
from mllm_compile.runtime.cuda.virtual_memory import VirtualMemory
from mllm_compile.runtime.errors import DeviceMemoryError

Kind = tuple[Sequence[int], torch.dtype]  # shape and dtype of a tensor
_ALIGNMENT = 512  # bytes, as torch's allocator has it


class Memory(Protocol):
    """A stretch of an arena, as VirtualMemory documents it."""

    num_bytes: int

    @property
    def copy_bytes(self) -> int: ...
    def tensor(self) -> torch.Tensor: ...
    def map(self, *, restores: bool = False, chunks: Chunks | None = None) -> None: ...
    def unmap(self, chunks: Chunks | None = None) -> None: ...
    def fill_zeros(self) -> None: ...
    def pin_copy(self) -> None: ...
    def save(self) -> None: ...


class Arena:
    """
    Attributes:
        is_awake: there is memory behind its tensors.

    Args:
        take: takes a stretch of so many bytes, which lives as long as a tensor over it.
    """

    def __init__(self, take: Callable[[int], Memory]) -> None:
        self._take = take
        self._stretches: weakref.WeakSet[Memory] = weakref.WeakSet()
        self._saved: int | None = None  # what the host has a copy of
        self._unmapping = threading.Lock()
        self.is_awake = True

    @property
    def num_bytes(self) -> int:
        """Bytes of all that is alive."""
        return sum(one.num_bytes for one in self._stretches)

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that copies have."""
        return sum(one.copy_bytes for one in self._stretches)

    def empty(self, kinds: Sequence[Kind]) -> list[torch.Tensor]:
        """Uninitialised tensors, in one stretch.

        Raises:
            DeviceMemoryError: there is too little memory.
        """
        starts, end = [], 0
        for shape, dtype in kinds:
            starts.append(end)
            end += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if not kinds:
            return []
        stretch = self._take(max(end, 1))
        self._stretches.add(stretch)
        whole = stretch.tensor()
        return [
            whole[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
            for start, (shape, dtype) in zip(starts, kinds, strict=True)
        ]

    def zeros(self, kinds: Sequence[Kind]) -> list[torch.Tensor]:
        """Like `empty`, filled with zeros."""
        tensors = self.empty(kinds)
        for tensor in tensors:
            tensor.zero_()
        return tensors

    def prepare_to_save(self) -> None:
        """Takes the host's memory for a copy, which is slow the first time; from any thread.

        Raises:
            DeviceMemoryError: the host has too little.
        """
        for one in self._stretches:
            one.pin_copy()

    def save(self, version: int) -> None:
        """Copies what it holds to the host, unless the copy there is of this version."""
        if self._saved != version:
            self._saved = None
            for one in self._stretches:
                one.save()
            self._saved = version

    def forget(self) -> None:
        """Makes the host's copy one of no version. Its memory stays for the next: to take it anew, and to give it back,
        takes seconds."""
        self._saved = None

    def sleep(self, chunks: Chunks | None = None) -> None:
        """Gives the memory back; nothing may use it, and nothing may be in flight. Once or often.

        Args:
            chunks: gets what it can be handed over in; None: all goes back to the device.
        """
        with self._unmapping:
            self.is_awake = False
            for one in self._stretches:
                one.unmap(chunks)

    @contextmanager
    def staying(self) -> Iterator[bool]:
        """Tells if there is memory, which then stays meanwhile; for readers beside the engine's thread."""
        with self._unmapping:
            yield self.is_awake

    def wake(self, chunks: Chunks | None = None) -> None:
        """Takes memory, and fills it with what was saved, else with zeros. All or nothing; once or often.

        Args:
            chunks: these are taken first.

        Raises:
            DeviceMemoryError: there is too little.
        """
        if self.is_awake:
            return
        restores = self._saved is not None
        try:
            for one in self._stretches:
                one.map(restores=restores, chunks=chunks)
        except BaseException:
            self.sleep()
            raise
        for one in () if restores else self._stretches:
            one.fill_zeros()
        self.is_awake = True


def arena_on(device: torch.device) -> Arena | None:
    """A new arena; None on a CPU, where memory stays where it is."""
    return Arena(partial(_taken, device=device)) if device.type == "cuda" else None


def _taken(num_bytes: int, device: torch.device) -> Memory:
    try:
        return VirtualMemory(num_bytes, device)
    except DeviceMemoryError:  # what torch keeps for later may be enough
        torch.cuda.empty_cache()
        return VirtualMemory(num_bytes, device)
