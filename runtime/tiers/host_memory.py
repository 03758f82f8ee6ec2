"""Slots in the host's memory, which a GPU copies from and to.

A GPU's driver has to register memory, beside the start, and a copy waits for its slots alone. Launches wait while the
driver registers a part, and all that the process asks of its memory while pages are made. So parts are small, few pages
are made ahead, and a pause follows each part. It is long while steps run, unless a copy waits for more. There is none
where a load waits: only behind a start that has found its pages there, when hardly any request runs.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch

from mllm_compile.runtime.cuda import driver, host_pages
from mllm_compile.runtime.device.memory import check_fits
from mllm_compile.runtime.errors import DeviceMemoryError
from mllm_compile.runtime.tiers.kept import KeptSlots
from mllm_compile.runtime.tiers.layout import ALIGNMENT

_PORTABLE = 1  # CU_MEMHOSTREGISTER_…
_PAUSE = 9.0  # behind a part beside steps, times what it took; once that where a store waits, and in an idle engine
_IDLE_S = 0.5  # without a step
_AHEAD = 2 * host_pages.THREADS  # parts whose pages are made before they are registered


def check_host_memory(num_bytes: int) -> None:
    """
    Raises:
        DeviceMemoryError: the system has less.
    """
    what = "the host's memory of runtime.kv_offloading_size needs"
    check_fits(num_bytes, what, "Lower it.", torch.device("cpu"))


@contextmanager
def refused_memory(num_bytes: int) -> Iterator[None]:
    """Tells in words that the system refuses memory.

    Raises:
        DeviceMemoryError: it did.
    """
    try:
        yield
    except OSError as error:
        raise DeviceMemoryError(
            f"runtime.kv_offloading_size: the system refuses {num_bytes / 2**30:.2f} GiB of memory ({error.strerror}). "
            "Lower it."
        ) from error


class HostMemory:
    """
    Args:
        chunks: bytes of each part that is registered by itself: no copy may reach from one into the next.
        device: whose GPU copies; a CPU needs no registration.
        kept: memory that outlives the process, for the same; None: it has none.
        is_lent: other processes may map it, so it is a file in memory, which cannot shrink.
        borrowed: the descriptor of such a file that another process has made, which is closed here at the end.

    Attributes:
        data: [num_bytes] uint8.
        step_s: when the engine's thread has last looked for work, by time.monotonic(); that thread sets it.
        file: its descriptor, where it is lent or borrowed; else None.

    Raises:
        DeviceMemoryError: the system has too little.
    """

    def __init__(
        self,
        chunks: Sequence[int],
        device: torch.device,
        kept: KeptSlots | None = None,
        is_lent: bool = False,
        borrowed: int | None = None,
    ) -> None:
        size = max(sum(chunks), ALIGNMENT)
        self._chunks, self._kept = chunks, kept
        self.file = borrowed
        if kept is None:
            check_host_memory(size)
            with refused_memory(size):
                self.file = file_in_memory(size) if is_lent else borrowed
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if self.file is None else mmap.MAP_SHARED
                memory, start = mmap.mmap(-1 if self.file is None else self.file, size, flags), 0
        else:
            memory, start = kept.map, kept.data_start
        self.data = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8, count=size, offset=start))
        host_pages.prefer_large(self.data.data_ptr(), size)
        # Bytes, from the first on: those of which copies, and loads, wait for the last.
        self._num_registered = self._num_wanted = self._num_of_loads = 0
        self.step_s = -math.inf
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
            self._reserve(0, size)
            self._num_registered = size

    @property
    def num_bytes(self) -> int:
        return self.data.numel()

    @property
    def is_registered(self) -> bool:
        """All of it is."""
        return self._num_registered >= self.data.numel()

    def hurry(self, end: int) -> None:
        """Has the first `end` bytes registered without a pause, as loads will wait for them. From any thread."""
        if self._num_registered < end:
            with self._more:
                self._num_of_loads = max(self._num_of_loads, end)
                self._more.notify_all()

    def wait_until(self, end: int) -> None:
        """Waits until the first `end` bytes can be copied.

        Raises:
            DeviceError: the driver refuses them.
        """
        if self._num_registered >= end:
            return
        with self._more:
            self._num_wanted = max(self._num_wanted, end)
            self._more.notify_all()
            self._more.wait_for(lambda: self._num_registered >= end or self._fault is not None or self._is_closing)
            if self._fault is not None:
                raise self._fault

    def close(self) -> None:
        """Gives the memory back, or lets another process have it; no copy may be in flight."""
        with self._more:
            self._is_closing = True
            self._more.notify_all()
        if self._thread is not None:
            self._thread.join()
            start = 0
            for count in self._chunks:
                if start < self._num_registered:
                    self._call("cuMemHostUnregister", start)
                start += count
        self._num_registered = 0
        if self._kept is not None:
            self._kept.close()
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def _reserve(self, start: int, count: int) -> None:
        """
        Raises:
            DeviceMemoryError: the system has too little.
        """
        if self._kept is not None:
            with refused_memory(count):
                self._kept.reserve(start, count)

    def _register(self) -> None:
        """Has all parts registered, or tells why the next one is not."""
        parts = list(zip(np.cumsum([0, *self._chunks[:-1]]).tolist(), self._chunks, strict=True))
        with ThreadPoolExecutor(host_pages.THREADS, thread_name_prefix="mllm-tier-pages") as populators:
            populated = deque[Future[None]]()
            try:
                for number, (start, count) in enumerate(parts):
                    for part in parts[number + len(populated) : number + _AHEAD]:
                        populated.append(populators.submit(self._populate, *part))
                    populated.popleft().result()
                    if self._is_closing:
                        return
                    began = time.monotonic()
                    self._call("cuMemHostRegister_v2", start, ctypes.c_size_t(count), ctypes.c_uint(_PORTABLE))
                    with self._more:
                        self._num_registered += count
                        self._more.notify_all()
                    self._pause(time.monotonic() - began)
            except Exception as error:
                with self._more:  # before it waits for those that make pages, which end then
                    self._fault = error
                    self._more.notify_all()

    def _pause(self, took_s: float) -> None:
        """Leaves the driver to others, behind a part that took so long."""
        with self._more:
            if self._more.wait_for(lambda: self._is_short_of(self._num_of_loads), took_s):
                return
            if time.monotonic() - self.step_s < _IDLE_S:
                self._more.wait_for(
                    lambda: self._is_short_of(max(self._num_of_loads, self._num_wanted)), (_PAUSE - 1) * took_s
                )

    def _is_short_of(self, num_bytes: int) -> bool:
        return num_bytes > self._num_registered or self._is_closing

    def _populate(self, start: int, count: int) -> None:
        """Has the system make the pages of a part now."""
        if not self._is_closing and self._fault is None:
            self._reserve(start, count)
            host_pages.make(self.data.data_ptr() + start, count)

    def _call(self, name: str, start: int, *arguments: ctypes.c_size_t | ctypes.c_uint) -> None:
        address = ctypes.c_void_p(self.data.data_ptr() + start)
        driver.call(name, self._device, "registering the memory of runtime.kv_offloading_size", address, *arguments)


def file_in_memory(size: int) -> int:
    """The descriptor of a new file of so many bytes, which cannot shrink: a map of it never faults."""
    file = os.memfd_create("mllm-kv-lent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(file)
        raise
    return file
