"""Shared memory that images travel in: one file below /dev/shm a prompt, of a fixed size, with a name.

Its owner makes it and removes its name; a worker writes into it. The receiver of the tensors maps it and removes the
name at once, so that the memory goes with the last tensor. A process that was killed leaves its segments; the next one
that makes segments removes those whose owner's lock is free. (A process number says nothing where containers share the
folder: each has its own numbers.)
"""

from __future__ import annotations

import atexit
import fcntl
import mmap
import os
import secrets
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mllm_compile.errors import MllmError

_FOLDER = Path("/dev/shm")
_PREFIX = "mllm-media-"
_ALIGNED = 64  # bytes

Layout = list[list[Any]]  # of each tensor: name, dtype, shape, offset in bytes


class _Owner:
    """This process as an owner of segments: a locked file, which is seen to be free when the process is gone."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        while True:
            self.name = f"{_PREFIX}{self._pid}-{secrets.token_hex(8)}"
            path = _lock_of(self.name)
            lock = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                break
            os.close(lock)  # another process found it before it was locked, and has removed it
        atexit.register(self._end, path)

    def _end(self, path: Path) -> None:
        if os.getpid() == self._pid:  # and no fork of it
            path.unlink(missing_ok=True)


_owner_lock = threading.Lock()
_owner: _Owner | None = None


def _own_name() -> str:
    """A name for a segment of this process."""
    global _owner
    with _owner_lock:
        _owner = _owner or _Owner()
        return f"{_owner.name}-{secrets.token_hex(8)}"


def _after_fork() -> None:
    global _owner, _owner_lock
    _owner, _owner_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class Segment:
    """Shared memory of this process; room that nobody writes to takes no memory.

    Args:
        num_bytes: its size.

    Raises:
        MllmError: the system gives none.
    """

    def __init__(self, num_bytes: int) -> None:
        self.name = ""
        try:
            self.name = _own_name()
            descriptor = os.open(_FOLDER / self.name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(descriptor, num_bytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            self.remove()
            raise MllmError(f"no shared memory for images below {_FOLDER}: {error.strerror}.") from None

    def remove(self) -> None:
        """Removes the name; mapped memory stays until it is unmapped. May be called again."""
        if self.name:
            remove_segment(self.name)


def remove_segment(name: str) -> None:
    """Removes a name, if it is still there."""
    with suppress(FileNotFoundError):
        os.unlink(_FOLDER / name)


def remove_left_segments() -> None:
    """Removes the segments of processes that are gone."""
    for lock in _FOLDER.glob(f".{_PREFIX}*"):
        with suppress(OSError):  # its owner lives, or it is another user's, or gone meanwhile
            descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                lock.unlink()
            finally:
                os.close(descriptor)
    for segment in _FOLDER.glob(f"{_PREFIX}*"):
        if not _lock_of(segment.name.rpartition("-")[0]).exists():
            with suppress(OSError):
                segment.unlink()


def _lock_of(owner: str) -> Path:
    return _FOLDER / f".{owner}.lock"


class SegmentFull(Exception):
    """There is no room for the tensors, in the segment or in the machine's shared memory."""


def write_tensors(name: str, items: Iterable[Mapping[str, np.ndarray]]) -> list[Layout]:
    """Writes each item's tensors into a segment.

    Raises:
        SegmentFull: they do not fit.
        OSError: there is no such segment.
    """
    descriptor = os.open(_FOLDER / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        layouts, end = [], 0
        placed = []
        for tensors in items:
            layout: Layout = []
            for key, tensor in tensors.items():
                begin = -(-end // _ALIGNED) * _ALIGNED
                end = begin + tensor.nbytes
                layout.append([key, tensor.dtype.str, list(tensor.shape), begin])
                placed.append((begin, tensor))
            layouts.append(layout)
        if end > os.fstat(descriptor).st_size:
            raise SegmentFull
        try:
            os.posix_fallocate(descriptor, 0, max(1, end))  # a page that the machine lacks would end this process
        except OSError:
            raise SegmentFull from None
        with mmap.mmap(descriptor, 0) as memory:
            for begin, tensor in placed:
                memory[begin : begin + tensor.nbytes] = tensor.tobytes()
        return layouts
    finally:
        os.close(descriptor)


def take_tensors(name: str, layouts: Iterable[Layout]) -> list[dict[str, np.ndarray]]:
    """Each item's tensors, in the segment's memory, whose name is removed; not to be written to.

    Raises:
        OSError, ValueError: there is no such segment, or it is smaller than the layouts say.
    """
    descriptor = os.open(_FOLDER / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
        remove_segment(name)
    found = []
    for layout in layouts:
        tensors = {}
        for key, dtype, shape, begin in layout:
            count = int(np.prod(shape, dtype=np.int64))
            tensors[key] = np.frombuffer(memory, np.dtype(dtype), count, begin).reshape(shape)
        found.append(tensors)
    return found
