"""The limit of a folder of files with all its namespaces: old ones go, those in use share it.

Each namespace counts its bytes in a small file, which others read. One that no process uses is removed when room is
needed, the one that was used longest ago first.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import re
import secrets
import shutil
import struct
import threading
import time
from pathlib import Path

logger = logging.getLogger("mllm_compile.tiers")

_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_GOING = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{8}\.gone")
_COUNT = struct.Struct("<q")
_LOOK_S = 1.0


def lock_of(folder: Path) -> int:
    """The open lock file of a namespace, which is made.

    Raises:
        OSError: it cannot be.
    """
    return os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def in_use(lock: int) -> bool:
    """False: this process has taken the lock now."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def is_at(lock: int, folder: Path) -> bool:
    """False if the folder was removed since its lock was opened."""
    try:
        return os.path.samestat(os.fstat(lock), os.lstat(folder / "lock"))
    except OSError:
        return False


class DiskRoom:
    """The room of one namespace, whose lock this process has; for any thread.

    Args:
        root: the folder of all.
        most_bytes: that all may take together.

    Attributes:
        share: of most_bytes, that others leave to this one, when they were last looked at.

    Raises:
        OSError: the folder cannot be read or written.
    """

    def __init__(self, root: Path, folder: Path, most_bytes: int) -> None:
        self._root, self._folder, self._most_bytes = root, folder, most_bytes
        handle = os.open(folder / "used", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(handle, _COUNT.size)
            self._count = mmap.mmap(handle, _COUNT.size)
        finally:
            os.close(handle)
        self._lock = threading.Lock()
        self._looked_s = 0.0
        self.share = 1.0
        for left in (one for one in os.scandir(root) if _GOING.fullmatch(one.name)):
            shutil.rmtree(left, ignore_errors=True)
        self.look()

    def holds(self, num_bytes: int) -> None:
        """Notes what this namespace takes."""
        with self._lock:
            _COUNT.pack_into(self._count, 0, num_bytes)

    def add(self, num_bytes: int) -> None:
        """Notes that it takes so much more."""
        with self._lock:
            _COUNT.pack_into(self._count, 0, _COUNT.unpack_from(self._count)[0] + num_bytes)

    def look(self) -> None:
        """Looks at the others, once a second at most; removes unused ones where all take too much."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked_s < _LOOK_S:
                return
            self._looked_s = now
            os.utime(self._folder / "used")
            own = _COUNT.unpack_from(self._count)[0]
            others = [Path(one) for one in os.scandir(self._root) if _NAMESPACE.fullmatch(one.name)]
            taken = {one: _bytes_of(one) for one in others if one != self._folder}
            for one in sorted(taken, key=_used_at):
                if own + sum(taken.values()) <= self._most_bytes:
                    break
                if _removed(one):
                    del taken[one]
            self.share = min(1.0, max(0.0, 1.0 - sum(taken.values()) / self._most_bytes))

    def close(self) -> None:
        """Ends; notes when it was used."""
        self._count.close()
        os.utime(self._folder / "used")


def _bytes_of(folder: Path) -> int:
    try:
        return int(_COUNT.unpack((folder / "used").read_bytes())[0])
    except (OSError, struct.error):  # of a version that did not count
        return sum(_size(Path(path, name)) for path, _, names in os.walk(folder) for name in names)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _used_at(folder: Path) -> float:
    try:
        return (folder / "used").stat().st_mtime
    except OSError:
        return 0.0


def _removed(folder: Path) -> bool:
    """Removes a namespace that no process uses; False: one does."""
    try:
        lock = lock_of(folder)
    except OSError:
        return False
    try:
        if in_use(lock):
            return False
        gone = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.gone")
        folder.rename(gone)
    except OSError as error:
        logger.debug("%s is not removed: %s", folder, error.strerror)
        return False
    finally:
        os.close(lock)
    shutil.rmtree(gone, ignore_errors=True)
    logger.info("%s was not used any more and is removed: the folder's limit is reached", folder)
    return True
