"""A file in memory with a name: prefixes in it outlive the server, for the next one. Removing it gives the memory back.

It is this user's alone, as keys and values can be turned into prompts again. kept.py says what is in it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from mllm_compile.runtime.tiers.connector import KVConnectorError

_IN_MEMORY = "tmpfs"


def open_memory_file(path: Path) -> int:
    """A descriptor of the file, which is made where it is not there.

    Raises:
        KVConnectorError: it is another user's, open to others, no file, or none in memory.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise KVConnectorError(f"{path}: {error.strerror}") from error
    try:
        _check(path, os.fstat(handle))
    except BaseException:
        os.close(handle)
        raise
    return handle


def check_room(path: Path, descriptor: int, num_bytes: int) -> None:
    """
    Raises:
        KVConnectorError: the file cannot become so large.
    """
    room, has = os.fstatvfs(descriptor), os.fstat(descriptor).st_blocks * 512
    free = room.f_bavail * room.f_frsize + has
    if room.f_blocks and free < num_bytes:  # one without a limit tells no blocks
        raise KVConnectorError(
            f"{path}: expected room for {num_bytes / 2**30:.2f} GiB, got {free / 2**30:.2f} GiB. Lower "
            "runtime.kv_offloading_size, or give the file system more"
        )


def _check(path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise KVConnectorError(f"{path}: expected a file with one name")
    if status.st_uid != os.getuid() or mode & 0o077:
        raise KVConnectorError(
            f"{path}: expected a file of user {os.getuid()} alone, got one of user {status.st_uid} with mode {mode:o}"
        )
    kind = _file_system(status.st_dev)
    if kind != _IN_MEMORY:
        raise KVConnectorError(f"{path}: expected a file in memory, as in /dev/shm; got one on {kind}")


def _file_system(device: int) -> str:
    """The kind of the file system with this number, as `mount` names it (proc(5), mountinfo)."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == number:
            return rest.split()[0]
    return "an unknown file system"
