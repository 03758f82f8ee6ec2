"""Pages of the host's memory: large ones, and such that are there before a driver registers them one by one.

With four threads 24 GiB took a host of H200s 4.9 s; the driver alone took 59 s for 64 GiB (docs/lab/tiers.md).
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache

THREADS = 4  # that make pages at once
LARGE_BYTES = 2 << 20  # of a large page
_POPULATE_WRITE = 23  # MADV_…, since Linux 5.14


def prefer_large(address: int, num_bytes: int) -> None:
    """Has the system make large pages of those within where it can: fewer are made, and registered, sooner."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    if address + num_bytes - start >= LARGE_BYTES:
        _advise(mmap.MADV_HUGEPAGE, start, address + num_bytes - start)


def make(address: int, num_bytes: int) -> None:
    """Has the system make the pages now, without the interpreter's lock; where it does not, the driver has it do so."""
    _advise(_POPULATE_WRITE, address, num_bytes)


def _advise(advice: int, address: int, num_bytes: int) -> None:
    """Calls madvise; what the system does not know is left."""
    _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(advice))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
