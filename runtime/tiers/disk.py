"""Pages and states in files, behind the host's memory: they are there again after a restart.

A folder for each namespace: what was computed by the same model with the same numerics. A file for each page or state,
whose name says its place in the tree; it is written beside and renamed. Files are this user's alone (0600, folders
0700): keys and values can be turned into the prompt again. A sum finds damage, not forgery. One process at a time uses
a namespace; another one serves without.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import stat
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

logger = logging.getLogger("mllm_compile.tiers")

FORMAT = 1
_MAGIC = b"MLLMKV01"
_HEADER = struct.Struct("<8sI4x16s16s16sQQQ40x")  # magic, format, key, parent, first, depth, bytes, sum
_MULTIPLIER = 0x9E3779B97F4A7C15
_SECRET_BYTES = 32
_UNFINISHED = ".new"  # behind the names of files that are being written


class DiskTierError(Exception):
    """The folder cannot be used; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class Place:
    """A page or a state by its place in the tree of prefixes; fields as in Entry."""

    key: bytes
    parent: bytes
    first: bytes
    depth: int
    is_state: bool

    @property
    def name(self) -> str:
        """The file's, inside its namespace."""
        kind = "s" if self.is_state else "p"
        return f"{self.key[:1].hex()}/{self.key.hex()}-{self.parent.hex()}-{self.first.hex()}-{self.depth:x}{kind}"

    @classmethod
    def of_name(cls, name: str) -> Place | None:
        """The place that a file's name says; None: the file is not of this tier."""
        parts = name.split("-")
        try:
            key, parent, first = (bytes.fromhex(part) for part in parts[:3])
            place = cls(key, parent, first, int(parts[3][:-1], 16), parts[3][-1] == "s")
        except (ValueError, IndexError):
            return None
        return place if place.name.rpartition("/")[2] == name else None


class DiskFiles:
    """The files of one namespace.

    Args:
        root: `runtime.kv_offloading_disk_path`.
        namespace: facts that keys and values depend on, besides tokens and salts.

    Attributes:
        secret: of the keys.

    Raises:
        DiskTierError: another process uses it, it is not this user's, or it cannot be written.
    """

    def __init__(self, root: Path, namespace: Mapping[str, str]) -> None:
        text = json.dumps({"format": str(FORMAT), **namespace}, sort_keys=True, indent=1)
        self.folder = root / blake2b(text.encode(), digest_size=16).hexdigest()
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            _check_own(root, others=0o022)
            _check_own(self.folder, others=0o077)
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DiskTierError(f"{error.filename or self.folder}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise DiskTierError(f"{self.folder} is used by another process; one at a time can") from error
        try:
            self.secret = self._kept("secret", lambda: secrets.token_bytes(_SECRET_BYTES))
            self._kept("namespace.json", text.encode)
        except OSError as error:
            self.close()
            raise DiskTierError(f"{self.folder}: {error.strerror}") from error
        self._multipliers = np.empty(0, dtype=np.uint64)

    def places(self) -> Iterator[tuple[Place, float]]:
        """All files with the times of their last use, and removes what an end in the midst of a write has left.

        Raises:
            DiskTierError: a folder cannot be read.
        """
        try:
            folders = [one for one in os.scandir(self.folder) if one.is_dir(follow_symlinks=False)]
            for file in (file for one in folders for file in os.scandir(one)):
                place = Place.of_name(file.name)
                if place is not None:
                    yield place, file.stat(follow_symlinks=False).st_mtime
                elif file.name.endswith(_UNFINISHED):
                    os.unlink(file)
        except OSError as error:
            raise DiskTierError(f"{error.filename or self.folder}: {error.strerror}") from error

    def write(self, place: Place, data: np.ndarray) -> None:
        """Writes a page or a state, data [n] uint8 with n a multiple of 8.

        Raises:
            OSError: there is no room, or the folder cannot be written.
        """
        path = self.folder / place.name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        header = self._header(place, data)
        _write_whole(path, (header, data.data))

    def read(self, place: Place, data: np.ndarray) -> bool:
        """Reads a page or a state into data [n] uint8; False: the file is gone, foreign or damaged, and removed."""
        path = self.folder / place.name
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            status = os.fstat(handle)
            header = bytearray(_HEADER.size)
            is_whole = (
                status.st_uid == os.getuid()
                and status.st_size == len(header) + data.nbytes
                and os.preadv(handle, [header], 0) == len(header)
                and _read_all(handle, data, len(header))
                and bytes(header) == self._header(place, data)
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
            self.remove(place)
        return is_whole

    def remove(self, place: Place) -> None:
        """Removes a file, if it is there."""
        try:
            os.unlink(self.folder / place.name)
        except OSError as error:
            logger.debug("%s is not removed: %s", place.name, error.strerror)

    def close(self) -> None:
        """Lets another process have the namespace."""
        os.close(self._lock)

    def _header(self, place: Place, data: np.ndarray) -> bytes:
        of_place = place.key, place.parent.ljust(16, b"\0"), place.first, place.depth
        return _HEADER.pack(_MAGIC, FORMAT, *of_place, data.nbytes, self._sum(data))

    def _sum(self, data: np.ndarray) -> int:
        """64 bits: a change within one word is always found, others but for chance."""
        words = data.view(np.uint64)
        multipliers = self._multipliers
        if multipliers.size < words.size:
            with np.errstate(over="ignore"):
                mixed = np.arange(1, words.size + 1, dtype=np.uint64) * np.uint64(_MULTIPLIER)
                mixed ^= mixed >> np.uint64(29)
                multipliers = self._multipliers = mixed * np.uint64(2) + np.uint64(1)
        return int(np.dot(words, multipliers[: words.size]))

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
        DiskTierError: it is another user's, a link, or open to others.
    """
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise DiskTierError(f"{folder}: expected a folder of this user")
    if stat.S_IMODE(status.st_mode) & others:
        mode = stat.S_IMODE(status.st_mode)
        raise DiskTierError(
            f"{folder}: expected a folder that is closed to others, as its files tell prompts; got mode {mode:o} "
            f"(chmod 700 {folder})"
        )
