"""Many copies by the copy engines, in one call of the driver (12.8 and later): one call each takes the host 13 µs.

Structures and numbers are from cuda.h (CUDA Driver API, cuMemcpyBatchAsync).
"""

from __future__ import annotations

import ctypes

import numpy as np

from mllm_compile.runtime.cuda.driver import call_each

_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_BESIDE_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_AT_ONCE = 64  # copies of a call: launches wait for it, and did for 1.6 ms where it had 1,152


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_type", ctypes.c_int),
        ("source_id", ctypes.c_int),
        ("target_type", ctypes.c_int),
        ("target_id", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


def copy_batch(
    targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, *, stream: int, device: int, at_once: int = _AT_ONCE
) -> None:
    """Queues copies on a stream of its own, without waiting. They have no order among themselves.

    Args:
        targets, sources: [n] uint64, addresses on the device or in registered memory of the host, which stays.
        sizes: [n] uint64, bytes.
        at_once: copies of a call of the driver.

    Raises:
        DeviceError: the driver refuses one.
    """
    arrays = [np.ascontiguousarray(one, dtype=np.uint64) for one in (targets, sources, sizes)]
    firsts, width = [one.ctypes.data for one in arrays], arrays[0].itemsize
    behind = (
        ctypes.byref(_Attributes(source_order=_IN_STREAM_ORDER, flags=_BESIDE_COMPUTE)),
        ctypes.byref(ctypes.c_size_t(0)),  # the first copy with these attributes: all
        ctypes.c_size_t(1),
        ctypes.byref(ctypes.c_size_t()),
        ctypes.c_void_p(stream),
    )
    calls = (
        (
            *(ctypes.c_void_p(first + start * width) for first in firsts),
            ctypes.c_size_t(min(at_once, sizes.size - start)),
            *behind,
        )
        for start in range(0, sizes.size, at_once)
    )
    call_each("cuMemcpyBatchAsync", device, "copies beside the steps", calls)
