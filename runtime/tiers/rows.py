"""Copies rows of pools to slots, and back: by torch on a CPU, by the driver's copy engines on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from mllm_compile.runtime.cuda.batched_copies import copy_batch
from mllm_compile.runtime.tiers.layout import SlotLayout


class DeviceRows:
    """The rows of a pool, by sections, which stay where they are.

    Attributes:
        bases, pitches: of sections, the address of their first row, and bytes from one to the next; [sections] uint64.
        offsets, widths: where each begins in a slot, and its bytes; [sections] uint64.
    """

    def __init__(self, layout: SlotLayout) -> None:
        self.sections = sections = layout.sections
        self.bases = np.array([section.rows.data_ptr() for section in sections], dtype=np.uint64)
        self.pitches = np.array([section.rows.stride(0) for section in sections], dtype=np.uint64)
        self.offsets = np.array([section.offset for section in sections], dtype=np.uint64)
        self.widths = np.array([section.num_bytes for section in sections], dtype=np.uint64)


class HostRows:
    """Slots of that layout in the host's memory, data [n] uint8."""

    def __init__(self, layout: SlotLayout, data: torch.Tensor) -> None:
        self.slot_bytes = layout.slot_bytes
        self.slots = data.view(-1, layout.slot_bytes) if layout.slot_bytes else data.new_empty((0, 0))

    def bytes_of(self, slot: int) -> np.ndarray:
        """[slot_bytes] uint8 of a slot; empty where slots hold nothing."""
        found: np.ndarray = (self.slots[slot] if self.slot_bytes else self.slots.flatten()).numpy()
        return found

    def value_of(self, slot: int) -> memoryview:
        """The bytes of a slot as the tier below has them."""
        return self.bytes_of(slot).data

    def buffer_of(self, slot: int) -> memoryview:
        """Memory that the tier below fills for a slot."""
        return self.bytes_of(slot).data

    def fill(self, slot: int, value: memoryview) -> None:
        """Gives a slot what its buffer got: it is the slot itself."""


class Copier(Protocol):
    """Copies of one thread, one after the other.

    Attributes:
        most: that are worth being queued at once.
    """

    most: int

    def begin_behind(self, launched: torch.cuda.Event | None) -> None:
        """Has what follows start behind an event of the engine's stream."""

    def load(self, pool: DeviceRows, rows: np.ndarray, host: HostRows, slots: np.ndarray) -> None:
        """Copies slots [n] to rows [n] of a pool."""

    def store(self, pool: DeviceRows, rows: np.ndarray, host: HostRows, slots: np.ndarray) -> None:
        """Copies rows [n] of a pool to slots [n]."""

    def end(self) -> Callable[[], None]:
        """Ends what is queued; gives the wait for it."""


def copier_on(device: torch.device) -> Copier:
    """A copier for the calling thread."""
    return _StreamCopier(device) if device.type == "cuda" else _PlainCopier()


class _PlainCopier:
    """A CPU's, whose steps are over when they are launched."""

    most = 1

    def begin_behind(self, launched: torch.cuda.Event | None) -> None:
        pass

    def end(self) -> Callable[[], None]:
        return _is_over

    def load(self, pool: DeviceRows, rows: np.ndarray, host: HostRows, slots: np.ndarray) -> None:
        targets, sources = torch.from_numpy(rows.astype(np.int64)), torch.from_numpy(slots)
        with torch.inference_mode():
            for section in pool.sections:
                part = host.slots[:, section.offset : section.offset + section.num_bytes]
                section.rows.index_copy_(0, targets, part.index_select(0, sources))

    def store(self, pool: DeviceRows, rows: np.ndarray, host: HostRows, slots: np.ndarray) -> None:
        sources, targets = torch.from_numpy(rows.astype(np.int64)), torch.from_numpy(slots)
        with torch.inference_mode():
            for section in pool.sections:
                part = host.slots[:, section.offset : section.offset + section.num_bytes]
                part.index_copy_(0, targets, section.rows.index_select(0, sources))


class _StreamCopier:
    """A GPU's, on a stream of its own. While one is copied the next is queued."""

    most = 2

    def __init__(self, device: torch.device) -> None:
        self._device = torch.cuda.current_device() if device.index is None else device.index
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream(self._device)

    def begin_behind(self, launched: torch.cuda.Event | None) -> None:
        if launched is not None:
            self._stream.wait_event(launched)

    def end(self) -> Callable[[], None]:
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event.synchronize

    def load(self, pool: DeviceRows, rows: np.ndarray, host: HostRows, slots: np.ndarray) -> None:
        on_device, on_host, sizes = addresses(pool, rows, host, slots)
        copy_batch(on_device, on_host, sizes, stream=self._stream.cuda_stream, device=self._device)

    def store(self, pool: DeviceRows, rows: np.ndarray, host: HostRows, slots: np.ndarray) -> None:
        on_device, on_host, sizes = addresses(pool, rows, host, slots)
        copy_batch(on_host, on_device, sizes, stream=self._stream.cuda_stream, device=self._device)


def addresses(
    pool: DeviceRows, rows: np.ndarray, host: HostRows, slots: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Addresses of each section of rows [n], those in slots [n], and bytes; each [n * sections] uint64."""
    on_device = pool.bases + rows.astype(np.uint64)[:, None] * pool.pitches
    first = np.uint64(host.slots.data_ptr())
    on_host = first + slots.astype(np.uint64)[:, None] * np.uint64(host.slot_bytes) + pool.offsets
    return on_device.ravel(), on_host.ravel(), np.broadcast_to(pool.widths, on_device.shape).ravel()


def _is_over() -> None:
    """A copy of a CPU is over when it is queued."""
