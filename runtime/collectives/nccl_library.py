"""NCCL by ctypes, as torch has loaded it.

Numbers and structures are from nccl.h (NCCL 2.20 and later).
"""

from __future__ import annotations

import atexit
import ctypes
import threading
from collections.abc import Callable
from functools import cache

import torch

from mllm_compile.runtime.errors import DeviceError

ID_BYTES = 128
TYPES = {
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
SUM = 0
NO_PART = -1  # of a rank that is in none of the parts of a group
IN_PROGRESS = 7  # a call that goes on, of a group that waits for nobody


class UniqueId(ctypes.Structure):
    """The bytes that the ranks of a group have in common."""

    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


class Config(ctypes.Structure):
    """The ncclConfig_t of NCCL 2.14, whose later fields are then the library's own: a group that waits for nobody."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )

    def __init__(self) -> None:
        super().__init__(ctypes.sizeof(Config), 0xCAFEBEEF, 21400, 0)


@cache
def library() -> ctypes.CDLL:
    """NCCL, as torch has loaded it.

    Raises:
        DeviceError: it cannot be loaded.
    """
    try:
        found = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise DeviceError(
            f"NCCL, which ranks on GPUs need, cannot be loaded: {error}. Install torch for CUDA."
        ) from None
    size, handle, kind = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    found.ncclGetErrorString.restype = ctypes.c_char_p
    found.ncclGetUniqueId.argtypes = [ctypes.POINTER(UniqueId)]
    found.ncclCommInitRank.argtypes = [ctypes.POINTER(handle), kind, UniqueId, kind]
    found.ncclAllReduce.argtypes = [handle, handle, size, kind, kind, handle, handle]
    found.ncclReduceScatter.argtypes = [handle, handle, size, kind, kind, handle, handle]
    found.ncclAllGather.argtypes = [handle, handle, size, kind, handle, handle]
    found.ncclBroadcast.argtypes = [handle, handle, size, kind, kind, handle, handle]
    found.ncclSend.argtypes = [handle, size, kind, kind, handle, handle]
    found.ncclRecv.argtypes = [handle, size, kind, kind, handle, handle]
    found.ncclCommSplit.argtypes = [handle, kind, kind, ctypes.POINTER(handle), handle]
    found.ncclCommAbort.argtypes = [handle]
    found.ncclCommInitRankConfig.argtypes = [ctypes.POINTER(handle), kind, UniqueId, kind, ctypes.POINTER(Config)]
    found.ncclCommGetAsyncError.argtypes = [handle, ctypes.POINTER(kind)]
    return found


def check(result: int, doing: str) -> None:
    """
    Raises:
        DeviceError: a call has failed.
    """
    if result:
        said = library().ncclGetErrorString(result).decode()
        raise DeviceError(f"NCCL answers {said!r} ({result}) to {doing}")


def end_beside(handle: ctypes.c_void_p, then: Callable[[], None] = lambda: None) -> None:
    """Aborts a group on a thread of its own, and calls `then` behind it.

    What is under way ends at once. NCCL returns when no captured graph has calls of the group any more. A process that
    exits does not wait for that, and leaves out what C++ libraries do at their end: CUDA would go away beneath NCCL.
    """

    def end() -> None:
        library().ncclCommAbort(handle)
        then()

    _exit_at_once()
    threading.Thread(target=end, name="nccl-abort", daemon=True).start()


@cache
def _exit_at_once() -> None:
    """Lets the process end behind Python's own end, with its status and all that C programs have written."""
    atexit.register(_leave_out_ends)


def _leave_out_ends() -> None:
    libc = ctypes.CDLL(None)
    libc.fflush(None)
    # The handler that came last is called first, with the status: a handler of Python's comes behind all libraries'.
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
