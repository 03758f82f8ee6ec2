"""Slots in the host's memory: one file in memory, which a GPU copies from and to.

A GPU's driver registers memory at about ten GB a second, so it does so beside the start, and a copy waits for its slots
alone. The file has no name: it goes with the process that holds it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np
import torch

from mllm_compile.runtime.cuda import driver
from mllm_compile.runtime.device.memory import check_fits
from mllm_compile.runtime.errors import DeviceMemoryError
from mllm_compile.runtime.tiers.layout import ALIGNMENT

_PORTABLE = 1  # CU_MEMHOSTREGISTER_…


class HostMemory:
    """
    Args:
        chunks: bytes of each part that is registered by itself: no copy may reach from one into the next.
        device: whose GPU copies; a CPU needs no registration.
        name: for tools that list a process's files.

    Attributes:
        data: [num_bytes] uint8.

    Raises:
        DeviceMemoryError: the system has too little.
    """

    def __init__(self, chunks: Sequence[int], device: torch.device, name: str = "mllm-kv-tier") -> None:
        size = max(sum(chunks), ALIGNMENT)
        self._chunks = chunks
        what = "the host's memory of runtime.kv_offloading_size needs"
        check_fits(size, what, "Lower it.", torch.device("cpu"))
        handle = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(handle, size)
            self._memory = mmap.mmap(handle, size)
        except OSError as error:
            raise DeviceMemoryError(
                f"runtime.kv_offloading_size: the system refuses {size / 2**30:.2f} GiB of memory ({error.strerror}). "
                "Lower it."
            ) from error
        finally:
            os.close(handle)
        self.data = torch.from_numpy(np.frombuffer(self._memory, dtype=np.uint8))
        self._num_registered = 0  # bytes, from the first on
        self._more = threading.Condition()
        self._fault: Exception | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._device = index
            self._thread = threading.Thread(target=self._register, name="mllm-tier-pin", daemon=True)
            self._thread.start()
        else:
            self._num_registered = size

    @property
    def num_bytes(self) -> int:
        return self.data.numel()

    def wait_for(self, end: int) -> None:
        """Waits until the first `end` bytes can be copied.

        Raises:
            DeviceError: the driver refuses them.
        """
        if self._num_registered >= end:
            return
        with self._more:
            self._more.wait_for(lambda: self._num_registered >= end or self._fault is not None or self._is_closing)
            if self._fault is not None:
                raise self._fault

    def close(self) -> None:
        """Gives the memory back; no copy may be in flight."""
        with self._more:
            self._is_closing = True
        if self._thread is not None:
            self._thread.join()
            start = 0
            for count in self._chunks:
                if start < self._num_registered:
                    self._call("cuMemHostUnregister", start)
                start += count
        self._num_registered = 0

    def _register(self) -> None:
        for count in self._chunks:
            if self._is_closing:
                return
            fault, start = None, self._num_registered
            try:
                self._call("cuMemHostRegister_v2", start, ctypes.c_size_t(count), ctypes.c_uint(_PORTABLE))
            except Exception as error:
                fault = error
            with self._more:
                self._fault = fault
                self._num_registered += 0 if fault else count
                self._more.notify_all()
            if fault:
                return

    def _call(self, name: str, start: int, *arguments: ctypes.c_size_t | ctypes.c_uint) -> None:
        address = ctypes.c_void_p(self.data.data_ptr() + start)
        driver.call(name, self._device, "registering the memory of runtime.kv_offloading_size", address, *arguments)
