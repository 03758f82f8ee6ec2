"""Bytes as a file that nobody can change any more, for loaders that take a path."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def as_file(name: str, data: bytes) -> Iterator[str]:
    """A path to these very bytes: a sealed file in memory. `name` is for tools that list a process's files."""
    handle = os.memfd_create(name, os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        yield f"/proc/self/fd/{handle}"
    finally:
        os.close(handle)
