"""Copies of stretches with strides between a GPU and registered memory of the host, by the copy engines."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from mllm_compile.runtime.cuda.driver import call_each

_HOST, _DEVICE = 1, 2  # CU_MEMORYTYPE_…


class Stretch(NamedTuple):
    """`num_rows` rows of `width` bytes each, in both memories.

    Attributes:
        on_device, on_host: the address of the first row.
        device_pitch, host_pitch: bytes from one row to the next.
    """

    on_device: int
    device_pitch: int
    on_host: int
    host_pitch: int
    width: int
    num_rows: int


class _Copy2D(ctypes.Structure):
    _fields_ = (
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_type", ctypes.c_uint),
        ("source_host", ctypes.c_void_p),
        ("source_device", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("target_x", ctypes.c_size_t),
        ("target_y", ctypes.c_size_t),
        ("target_type", ctypes.c_uint),
        ("target_host", ctypes.c_void_p),
        ("target_device", ctypes.c_uint64),
        ("target_array", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


def copy_stretches(stretches: Sequence[Stretch], *, to_device: bool, stream: int, device: int) -> None:
    """Queues copies on a stream, without waiting; the host's memory is registered and stays.

    Raises:
        DeviceError: the driver refuses one.
    """
    calls = []
    for one in stretches:
        copy = _Copy2D(width=one.width, height=one.num_rows)
        if to_device:
            copy.source_type, copy.source_host, copy.source_pitch = _HOST, one.on_host, one.host_pitch
            copy.target_type, copy.target_device, copy.target_pitch = _DEVICE, one.on_device, one.device_pitch
        else:
            copy.source_type, copy.source_device, copy.source_pitch = _DEVICE, one.on_device, one.device_pitch
            copy.target_type, copy.target_host, copy.target_pitch = _HOST, one.on_host, one.host_pitch
        calls.append((ctypes.byref(copy), ctypes.c_void_p(stream)))
    call_each("cuMemcpy2DAsync_v2", device, "a copy beside the steps", calls)
