"""A GPU's memory whose addresses stay while it is given back and taken anew.

Captured graphs, tensor maps and tensors hold addresses alone, so they stay valid. Structures and numbers are from
cuda.h ("CUDA Driver API", Virtual Memory Management).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from mllm_compile.runtime.cuda import host_pages
from mllm_compile.runtime.cuda.chunks import CHUNK_BYTES, Chunks
from mllm_compile.runtime.cuda.driver import call
from mllm_compile.runtime.errors import DeviceError, DeviceMemoryError

_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3  # CU_MEM_ALLOCATION_TYPE_…, CU_MEM_LOCATION_TYPE_…, CU_MEM_ACCESS_FLAGS_…
_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_HAS_DESCRIPTORS = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
_GRANULE = 2 << 20  # bytes of a page, on every GPU that has kernels
_PART = CHUNK_BYTES  # that are taken at once

_DEFAULT_STREAM = ctypes.c_void_p(0)


class _Part(NamedTuple):
    """Memory that is mapped.

    Attributes:
        descriptor: by which it came from another process, and may go to the next; None: it was taken here.
    """

    address: int
    num_bytes: int
    descriptor: int | None


_Parts = list[_Part]


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Allocation(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_char * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class VirtualMemory:
    """Addresses of a GPU, with memory behind them or without; they live as long as a tensor over them.

    Used by one thread at a time, and with nothing in flight that uses it.

    Attributes:
        num_bytes: in whole pages.

    Raises:
        DeviceMemoryError: there is too little memory.
        DeviceError: the driver refuses it.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = -(-num_bytes // _GRANULE) * _GRANULE
        self._device = torch.device("cuda", device.index or 0)
        self._index = self._device.index
        self._copy: _HostMemory | None = None
        self._is_restoring = False
        torch.cuda.current_stream(self._device).synchronize()  # makes the context
        address = ctypes.c_uint64()
        size, alignment, none = ctypes.c_size_t(self.num_bytes), ctypes.c_size_t(_GRANULE), ctypes.c_uint64(0)
        doing = f"reserving {self.num_bytes} addresses"
        call("cuMemAddressReserve", self._index, doing, ctypes.byref(address), size, alignment, none, none)
        self._address, self._mapped = address.value, _Parts()
        free = weakref.finalize(self, _free, self._index, self._address, self.num_bytes, self._mapped)
        free.atexit = False  # the process's memory goes with it
        self.map()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Its bytes, for torch (numba's CUDA Array Interface, version 3)."""
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self._address, False), "version": 3}

    @property
    def copy_bytes(self) -> int:
        """Bytes of the host's memory that a copy has."""
        return 0 if self._copy is None else self.num_bytes

    def tensor(self) -> torch.Tensor:
        """[num_bytes] uint8; it keeps this alive."""
        return torch.as_tensor(self, device=self._device)

    def map(self, *, restores: bool = False, chunks: Chunks | None = None) -> None:
        """Takes memory for all addresses. All or nothing, once or often.

        Args:
            restores: what was saved is there once the device is synchronised: copied part by part, while further ones
                are taken; else what memory holds is undefined.
            chunks: these are taken first.

        Raises:
            DeviceMemoryError: there is too little.
        """
        if self._mapped:
            return
        where = _Location(_DEVICE, self._index)
        try:
            for offset, num_bytes in _parts(self.num_bytes):
                self._map_part(self._address + offset, num_bytes, chunks)
                if restores:
                    self._open(self._address + offset, num_bytes, where)
                    self._restore(offset, num_bytes)
            if not restores:
                self._open(self._address, self.num_bytes, where)
        except BaseException:
            self.unmap()
            raise

    def _open(self, address: int, num_bytes: int, where: _Location) -> None:
        access, part = _Access(where, _READ_WRITE), (ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))
        call("cuMemSetAccess", self._index, "opening memory", *part, ctypes.byref(access), ctypes.c_size_t(1))

    def _map_part(self, address: int, num_bytes: int, chunks: Chunks | None) -> None:
        handle, descriptor = self._given(chunks if num_bytes == _PART else None) or (self._taken(num_bytes), None)
        size, none, doing = ctypes.c_size_t(num_bytes), ctypes.c_uint64(0), f"mapping {num_bytes} bytes"
        try:
            call("cuMemMap", self._index, doing, ctypes.c_uint64(address), size, ctypes.c_size_t(0), handle, none)
            self._mapped.append(_Part(address, num_bytes, descriptor))
        except BaseException:
            if descriptor is not None:
                os.close(descriptor)
            raise
        finally:  # the mapping holds it from here on
            call("cuMemRelease", self._index, doing, handle)

    def _taken(self, num_bytes: int) -> ctypes.c_uint64:
        """New memory, which the driver clears."""
        handle, has_descriptors = ctypes.c_uint64(), ctypes.c_int()
        asked = ctypes.byref(has_descriptors), ctypes.c_int(_HAS_DESCRIPTORS), ctypes.c_int(self._index)
        call("cuDeviceGetAttribute", self._index, "asking for its properties", *asked)
        kind = _Allocation(_PINNED, _DESCRIPTOR * bool(has_descriptors.value), _Location(_DEVICE, self._index))
        size, none, doing = ctypes.c_size_t(num_bytes), ctypes.c_uint64(0), f"taking {num_bytes} bytes"
        call("cuMemCreate", self._index, doing, ctypes.byref(handle), size, ctypes.byref(kind), none)
        return handle

    def _given(self, chunks: Chunks | None) -> tuple[ctypes.c_uint64, int] | None:
        """Another process's memory and its descriptor; None: there is no more, or the driver does not take it."""
        descriptor = None if chunks is None else chunks.take()
        if descriptor is None:
            return None
        handle, doing = ctypes.c_uint64(), "taking memory over"
        try:
            asked = ctypes.byref(handle), ctypes.c_void_p(descriptor), ctypes.c_int(_DESCRIPTOR)
            call("cuMemImportFromShareableHandle", self._index, doing, *asked)
        except DeviceError:
            os.close(descriptor)
            return None
        return handle, descriptor

    def unmap(self, chunks: Chunks | None = None) -> None:
        """Gives the memory back, for other processes too. Once or often.

        Args:
            chunks: gets what it can be handed over in; the rest goes back to the device.
        """
        if self._is_restoring:  # perhaps it still is, as where other memory could not be taken
            call("cuStreamSynchronize", self._index, "waiting for a copy", _DEFAULT_STREAM)
            self._is_restoring = False
        _unmap(self._index, self._mapped, chunks)

    def fill_zeros(self) -> None:
        """Makes all bytes zero, once the device is synchronised."""
        address, size = self._whole
        call("cuMemsetD8Async", self._index, "filling memory", address, ctypes.c_ubyte(0), size, _DEFAULT_STREAM)

    def pin_copy(self) -> None:
        """Takes pinned memory of the host for a copy, once or often; it stays. From any thread.

        Raises:
            DeviceMemoryError: the host has too little.
        """
        if self._copy is None:
            self._copy = _HostMemory(self.num_bytes, self._index)

    def save(self) -> None:
        """Copies its bytes to the host."""
        self.pin_copy()
        assert self._copy is not None, "it has just been taken"
        for offset, size in _parts(self.num_bytes):
            to, source = ctypes.c_void_p(self._copy.address + offset), ctypes.c_uint64(self._address + offset)
            doing = "a copy to the host"
            call("cuMemcpyDtoHAsync_v2", self._index, doing, to, source, ctypes.c_size_t(size), _DEFAULT_STREAM)
        call("cuStreamSynchronize", self._index, "waiting for a copy", _DEFAULT_STREAM)

    def _restore(self, offset: int, num_bytes: int) -> None:
        """Begins to copy a part of them back."""
        assert self._copy is not None, "what was saved is restored"
        to, source = ctypes.c_uint64(self._address + offset), ctypes.c_void_p(self._copy.address + offset)
        self._is_restoring = True
        doing, size = "a copy to the device", ctypes.c_size_t(num_bytes)
        call("cuMemcpyHtoDAsync_v2", self._index, doing, to, source, size, _DEFAULT_STREAM)

    @property
    def _whole(self) -> tuple[ctypes.c_uint64, ctypes.c_size_t]:
        return ctypes.c_uint64(self._address), ctypes.c_size_t(self.num_bytes)


class _HostMemory:
    """Pinned memory of the host, in parts: no copy may reach from one into the next. Given back with the object.

    Attributes:
        address: where it begins.
    """

    def __init__(self, num_bytes: int, device: int) -> None:
        doing, registered = f"pinning {num_bytes} bytes of the host", list[int]()
        try:
            memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise DeviceMemoryError(f"the system answers {error.strerror} to {doing}") from error
        start = self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        weakref.finalize(self, _unpin, device, registered, memory).atexit = False
        host_pages.prefer_large(start, num_bytes)
        with ThreadPoolExecutor(host_pages.THREADS, thread_name_prefix="mllm-pages") as makers:
            made = [makers.submit(host_pages.make, start + offset, size) for offset, size in _parts(num_bytes)]
            try:
                for (offset, size), pages in zip(_parts(num_bytes), made, strict=True):
                    pages.result()
                    part = ctypes.c_void_p(start + offset), ctypes.c_size_t(size), ctypes.c_uint(0)
                    call("cuMemHostRegister_v2", device, doing, *part)
                    registered.append(start + offset)
            except BaseException:
                makers.shutdown(cancel_futures=True)
                raise


def _parts(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Where parts begin, and their bytes."""
    return ((offset, min(_PART, num_bytes - offset)) for offset in range(0, num_bytes, _PART))


def _unmap(device: int, mapped: _Parts, chunks: Chunks | None = None) -> None:
    while mapped:
        part = mapped[-1]
        if chunks is not None and part.num_bytes == _PART and part.descriptor is None:
            part = mapped[-1] = part._replace(descriptor=_descriptor_of(device, part.address))
        whole = ctypes.c_uint64(part.address), ctypes.c_size_t(part.num_bytes)
        call("cuMemUnmap", device, "giving memory back", *whole)
        mapped.pop()
        if part.descriptor is not None:
            (os.close if chunks is None else chunks.add)(part.descriptor)


def _descriptor_of(device: int, address: int) -> int | None:
    """A descriptor that holds the memory which is mapped there; None: the driver has none for it."""
    handle, descriptor, doing = ctypes.c_uint64(), ctypes.c_int(-1), "handing memory over"
    with suppress(DeviceError):
        call("cuMemRetainAllocationHandle", device, doing, ctypes.byref(handle), ctypes.c_void_p(address))
        try:
            asked = ctypes.byref(descriptor), handle, ctypes.c_int(_DESCRIPTOR), ctypes.c_uint64(0)
            call("cuMemExportToShareableHandle", device, doing, *asked)
            os.set_inheritable(descriptor.value, False)
            return descriptor.value
        finally:
            call("cuMemRelease", device, doing, handle)
    return None


def _free(device: int, address: int, num_bytes: int, mapped: _Parts) -> None:
    with suppress(DeviceError):  # as far as it answers
        call("cuCtxSynchronize", device, "waiting")
        _unmap(device, mapped)
        whole = ctypes.c_uint64(address), ctypes.c_size_t(num_bytes)
        call("cuMemAddressFree", device, "giving addresses back", *whole)


def _unpin(device: int, registered: list[int], memory: mmap.mmap) -> None:
    """
    Args:
        memory: goes when nothing holds it, behind this.
    """
    with suppress(DeviceError):
        while registered:
            call("cuMemHostUnregister", device, "giving memory back", ctypes.c_void_p(registered.pop()))
