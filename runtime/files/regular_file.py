"""Opens and reads files that came from elsewhere: regular ones only, and never more than a bound.

A folder of others may hold a named pipe, a device or a terabyte of zeros under a name that is read from it. All reading
of such names goes through here.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # opening a named pipe does not wait for a writer


def open_regular(path: str | Path, *, dir_fd: int | None = None, follow_links: bool = True) -> int:
    """Opens a regular file for reading and returns its descriptor.

    Args:
        path: the file; relative to `dir_fd` where that is given.
        dir_fd: an open folder.
        follow_links: `path` may be a symbolic link (links in folders on the way are always followed).

    Raises:
        OSError: it cannot be opened, or is no regular file (EINVAL).
    """
    handle = os.open(path, _FLAGS if follow_links else _FLAGS | os.O_NOFOLLOW, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return handle


def read_descriptor(handle: int, max_bytes: int) -> bytes:
    """Reads an open regular file from where it is to its end.

    Raises:
        OSError: it cannot be read, or holds more than `max_bytes` (EFBIG).
    """
    size = os.fstat(handle).st_size
    data = b""
    if size <= max_bytes:
        with open(handle, "rb", closefd=False) as file:
            data = file.read(size + 1)
            if len(data) > size:  # it grows, or does not tell its size
                data += file.read(max_bytes + 1 - len(data))
        size = len(data)
    if size > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes")
    return data


def read_regular(path: str | Path, max_bytes: int) -> bytes:
    """Reads a whole regular file; a symbolic link is followed.

    Raises:
        OSError: it cannot be read, is no regular file (EINVAL), or holds more than `max_bytes` (EFBIG).
    """
    handle = open_regular(path)
    try:
        return read_descriptor(handle, max_bytes)
    finally:
        os.close(handle)
