"""Copies rows of pools to slots, and back: by torch on a CPU, by the driver's copy engines on a GPU.

Neighbouring pages in neighbouring slots are one copy for each layer, of as many rows; others are one each.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from mllm_compile.runtime.cuda.strided_copies import Stretch, copy_stretches
from mllm_compile.runtime.tiers.layout import SlotLayout


class DeviceRows:
    """The rows of a pool, by sections."""

    def __init__(self, layout: SlotLayout) -> None:
        self.sections = layout.sections


class HostRows:
    """Slots of that layout in the host's memory, data [n] uint8."""

    def __init__(self, layout: SlotLayout, data: torch.Tensor) -> None:
        self.slot_bytes, self.chunk_slots = layout.slot_bytes, layout.chunk_slots
        self.slots = data.view(-1, layout.slot_bytes) if layout.slot_bytes else data.new_empty((0, 0))

    def bytes_of(self, slot: int) -> np.ndarray:
        """[slot_bytes] uint8 of a slot; empty where slots hold nothing."""
        found: np.ndarray = (self.slots[slot] if self.slot_bytes else self.slots.flatten()).numpy()
        return found


class Copier(Protocol):
    """Copies of one thread, one after the other."""

    def begin_behind(self, launched: torch.cuda.Event | None) -> None:
        """Has what follows start behind an event of the engine's stream."""

    def load(self, pool: DeviceRows, rows: np.ndarray, host: HostRows, slots: np.ndarray) -> None:
        """Copies slots [n] to rows [n] of a pool."""

    def store(self, pool: DeviceRows, rows: np.ndarray, host: HostRows, slots: np.ndarray) -> None:
        """Copies rows [n] of a pool to slots [n]."""

    def wait(self) -> None:
        """Waits for all that was copied."""


def copier_on(device: torch.device) -> Copier:
    """A copier for the calling thread."""
    return _StreamCopier(device) if device.type == "cuda" else _PlainCopier()


class _PlainCopier:
    """A CPU's, whose steps are over when they are launched."""

    def begin_behind(self, launched: torch.cuda.Event | None) -> None:
        pass

    def wait(self) -> None:
        pass

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
    """A GPU's, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.cuda.current_device() if device.index is None else device.index
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream(self._device)
            self._is_over = torch.cuda.Event(blocking=True)

    def begin_behind(self, launched: torch.cuda.Event | None) -> None:
        if launched is not None:
            self._stream.wait_event(launched)

    def wait(self) -> None:
        self._is_over.record(self._stream)
        self._is_over.synchronize()

    def load(self, pool: DeviceRows, rows: np.ndarray, host: HostRows, slots: np.ndarray) -> None:
        self._copy(pool, rows, host, slots, is_load=True)

    def store(self, pool: DeviceRows, rows: np.ndarray, host: HostRows, slots: np.ndarray) -> None:
        self._copy(pool, rows, host, slots, is_load=False)

    def _copy(self, pool: DeviceRows, rows: np.ndarray, host: HostRows, slots: np.ndarray, is_load: bool) -> None:
        stretches, base = [], host.slots.data_ptr()
        for first, count in runs_of(rows, slots, host.chunk_slots):
            row, slot = int(rows[first]), int(slots[first])
            for section in pool.sections:
                pitch = section.rows.stride(0)
                on_device = section.rows.data_ptr() + row * pitch
                on_host = base + slot * host.slot_bytes + section.offset
                stretches.append(Stretch(on_device, pitch, on_host, host.slot_bytes, section.num_bytes, count))
        copy_stretches(stretches, to_device=is_load, stream=self._stream.cuda_stream, device=self._device)


def runs_of(rows: np.ndarray, slots: np.ndarray, chunk_slots: int) -> list[tuple[int, int]]:
    """(first, count) of each run of neighbours in both, with slots of one chunk."""
    is_cut = (np.diff(rows) != 1) | (np.diff(slots) != 1) | (np.diff(slots // chunk_slots) != 0)
    breaks = np.flatnonzero(is_cut) + 1
    edges = [0, *breaks.tolist(), len(rows)]
    return [(first, end - first) for first, end in pairwise(edges) if end > first]
