"""Pages and states in files, behind the host's memory: they are there again after a restart.

A folder for each namespace: what was computed by the same model with the same numerics. A file for each page or state,
whose name says its place in the tree; it is written beside and renamed. Files are this user's alone (0600, folders
0700): keys and values can be turned into the prompt again. A sum finds damage, not forgery. One process at a time uses
a namespace; another one serves without. disk_room.py has the limit.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from mllm_compile.runtime.tiers.connector import VERSION, KVConnectorError, Namespace
from mllm_compile.runtime.tiers.disk_room import DiskRoom, in_use, is_at, lock_of
from mllm_compile.runtime.tiers.place import Place
from mllm_compile.runtime.tiers.sealed import HEADER_BYTES, Seal

logger = logging.getLogger("mllm_compile.tiers")

_SECRET_BYTES = 32
_UNFINISHED = ".new"  # behind the names of files that are being written


class DiskFiles:
    """The files of one namespace; a KVConnector.

    Args:
        root: `runtime.kv_offloading_disk_path`.
        most_bytes: of files of all namespaces in there.

    Attributes:
        secret: of the keys.
        takes_writes: False once a write has failed: there will be no other.

    Raises:
        KVConnectorError: another process uses it, it is not this user's, or it cannot be written.
    """

    version = VERSION

    def __init__(self, root: Path, namespace: Namespace, most_bytes: int = 1 << 62) -> None:
        self.folder = root / namespace.name
        self.takes_writes = True
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = self._locked(root)
        except OSError as error:
            raise KVConnectorError(f"{error.filename or self.folder}: {error.strerror}") from error
        try:
            self.secret = self._kept("secret", lambda: secrets.token_bytes(_SECRET_BYTES))
            self._kept("namespace.json", lambda: namespace.text)
            self._room = DiskRoom(root, self.folder, most_bytes)
        except OSError as error:
            os.close(self._lock)
            raise KVConnectorError(f"{self.folder}: {error.strerror}") from error
        self._seal = Seal()

    @property
    def share(self) -> float:
        """The part of the limit that is left to this namespace, as it was last looked at."""
        return self._room.share

    def places(self) -> Iterator[tuple[Place, float]]:
        """All files with the times of their last use, and removes what an end in the midst of a write has left.

        Raises:
            KVConnectorError: a folder cannot be read.
        """
        num_bytes = 0
        try:
            folders = [one for one in os.scandir(self.folder) if one.is_dir(follow_symlinks=False)]
            for file in (file for one in folders for file in os.scandir(one)):
                place = Place.of_name(file.name)
                if place is not None:
                    status = file.stat(follow_symlinks=False)
                    num_bytes += status.st_size
                    yield place, status.st_mtime
                elif file.name.endswith(_UNFINISHED):
                    os.unlink(file)
        except OSError as error:
            raise KVConnectorError(f"{error.filename or self.folder}: {error.strerror}") from error
        self._room.holds(num_bytes)

    def lookup(self, places: Sequence[Place]) -> list[bool]:
        """See KVConnector.lookup."""
        return [self._path(place).exists() for place in places]

    def load(self, places: Sequence[Place], buffers: Sequence[memoryview]) -> list[bool]:
        """See KVConnector.load. A damaged file is removed."""
        return [
            self._read(place, np.frombuffer(buffer, dtype=np.uint8))
            for place, buffer in zip(places, buffers, strict=True)
        ]

    def store(self, places: Sequence[Place], values: Sequence[memoryview]) -> list[bool]:
        """See KVConnector.store. Says once why one is not written."""
        return [
            self._is_written(place, np.frombuffer(value, dtype=np.uint8))
            for place, value in zip(places, values, strict=True)
        ]

    def remove(self, places: Sequence[Place]) -> None:
        """See KVConnector.remove."""
        for place in places:
            try:
                num_bytes = os.lstat(self._path(place)).st_size
                os.unlink(self._path(place))
            except OSError as error:
                logger.debug("%s is not removed: %s", place.name, error.strerror)
            else:
                self._room.add(-num_bytes)

    def clear(self) -> None:
        """Removes all files."""
        self.remove([place for place, _ in self.places()])

    def close(self) -> None:
        """Lets another process have the namespace."""
        self._room.close()
        os.close(self._lock)

    def _path(self, place: Place) -> Path:
        return self.folder / place.key[:1].hex() / place.name

    def _is_written(self, place: Place, data: np.ndarray) -> bool:
        if not self.takes_writes:
            return False
        try:
            self._room.look()
            self._write(place, data)
        except OSError as error:
            if self.takes_writes:
                self.takes_writes = False
                logger.warning("no more is written to runtime.kv_offloading_disk_path: %s", error)
            return False
        return True

    def _write(self, place: Place, data: np.ndarray) -> None:
        """Writes data [n] uint8 with n a multiple of 8.

        Raises:
            OSError: there is no room, or the folder cannot be written.
        """
        path = self._path(place)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        is_new = not path.exists()
        _write_whole(path, (self._seal.header(place, data), data.data))
        if is_new:
            self._room.add(HEADER_BYTES + data.nbytes)

    def _read(self, place: Place, data: np.ndarray) -> bool:
        """Reads data [n] uint8; False: the file is gone, foreign or damaged, and removed."""
        path = self._path(place)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            status = os.fstat(handle)
            header = bytearray(HEADER_BYTES)
            is_whole = (
                status.st_uid == os.getuid()
                and status.st_size == HEADER_BYTES + data.nbytes
                and os.preadv(handle, [header], 0) == HEADER_BYTES
                and _read_all(handle, data, HEADER_BYTES)
                and bytes(header) == self._seal.header(place, data)
            )
            if is_whole:
                os.utime(handle)  # the order of use, for after a restart
        except OSError as error:
            logger.warning("%s cannot be read: %s", path, error.strerror)
            is_whole = False
        finally:
            os.close(handle)
        if not is_whole:
            logger.warning("%s is damaged: it is removed, and its tokens are computed", path)
            self.remove([place])
        return is_whole

    def _locked(self, root: Path) -> int:
        """The open lock of the folder, which is made.

        Raises:
            OSError: it cannot be made.
            KVConnectorError: another process has it, or others can change it.
        """
        while True:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            _check_own(root, others=0o022)
            _check_own(self.folder, others=0o077)
            lock = lock_of(self.folder)
            if in_use(lock):
                os.close(lock)
                raise KVConnectorError(f"{self.folder} is used by another process; one at a time can")
            if is_at(lock, self.folder):
                return lock
            os.close(lock)  # another process has just removed the folder

    def _kept(self, name: str, make: Callable[[], bytes]) -> bytes:
        """The content of a small file, which is made where it is not there."""
        path = self.folder / name
        if not path.exists() or not path.stat().st_size:
            _write_whole(path, (make(),))
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return os.read(handle, 1 << 16)
        finally:
            os.close(handle)


def _write_whole(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Writes a file that is there whole or not at all, of this user alone."""
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_UNFINISHED}")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(handle, rest) :]
        os.rename(beside, path)
    except BaseException:
        os.unlink(beside)
        raise
    finally:
        os.close(handle)


def _read_all(handle: int, data: np.ndarray, offset: int) -> bool:
    view = data.data
    while view:
        count = os.preadv(handle, [view], offset)
        if not count:
            return False
        view, offset = view[count:], offset + count
    return True


def _check_own(folder: Path, others: int) -> None:
    """
    Args:
        others: bits of the mode that may not be set.

    Raises:
        KVConnectorError: it is another user's, a link, or open to others.
    """
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise KVConnectorError(f"{folder}: expected a folder of this user")
    if stat.S_IMODE(status.st_mode) & others:
        mode = stat.S_IMODE(status.st_mode)
        raise KVConnectorError(
            f"{folder}: expected a folder that is closed to others, as its files tell prompts; got mode {mode:o} "
            f"(chmod 700 {folder})"
        )
