"""Reads files of a folder whose content gets executed: only what is ours, unwritable by others, and unchanged.

The folder is opened once and everything is read below that handle, so swapping it for another folder afterwards
has no effect. A file is read once: the hashed bytes are the bytes in use. docs/security.md says what this promises.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mllm_compile.errors import ArtifactError, CheckpointError
from mllm_compile.runtime.files.regular_file import open_regular, read_descriptor

MAX_FILE_BYTES = 1 << 31
MAX_FILES = 20_000
_MAX_DEPTH = 8  # folders in folders
_AGAIN = "compile the model again"
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True)
class FileFacts:
    """A manifest's facts about a file."""

    sha256: str
    num_bytes: int


class TrustedFolder:
    """A folder that belongs to this user (or root) and that no other can write to; see the module's header.

    Args:
        path: the folder; symbolic links on the way to it are followed, none inside it is.

    Raises:
        ArtifactError: there is no such folder, or it is foreign, or others can write to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._handle = os.open(path, _DIRECTORY_FLAGS)  # a pinned_path is of the very folder that it pins
        except OSError as error:
            raise ArtifactError(f"there is no runtime at {path}: {error.strerror}") from error
        self._close = weakref.finalize(self, os.close, self._handle)
        _check_status(path, os.fstat(self._handle))

    @property
    def pinned_path(self) -> Path:
        """A path to this very folder, whatever has its name now; valid while this object lives."""
        return Path(f"/proc/self/fd/{self._handle}")

    @contextmanager
    def naming_itself(self) -> Iterator[None]:
        """Makes errors of the body, which reads by `pinned_path`, name the folder by its name."""
        try:
            yield
        except (ArtifactError, CheckpointError) as error:
            raise type(error)(str(error).replace(str(self.pinned_path), str(self.path))) from error

    def list_files(self) -> set[str]:
        """Every file by its path inside the folder.

        Raises:
            ArtifactError: something in it is foreign, writable by others, or neither file nor folder; or there are
                more files, or folders in folders, than in any runtime.
        """
        found: set[str] = set()
        try:
            self._list(self._handle, "", 0, found)
        except OSError as error:
            raise ArtifactError(f"{self.path} cannot be looked into ({error.strerror}); {_AGAIN}") from error
        return found

    def read(self, name: str, facts: FileFacts | None = None, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """The bytes of a file; with `facts`, those that its manifest names.

        Raises:
            ArtifactError: it is missing, foreign, writable by others, too large, or not what `facts` says.
        """
        path = self.path / name
        limit = max_bytes if facts is None else min(max_bytes, facts.num_bytes)
        try:
            handle = open_regular(name, dir_fd=self._handle, follow_links=False)
            try:
                _check_status(path, os.fstat(handle))
                data = read_descriptor(handle, limit)
            finally:
                os.close(handle)
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise ArtifactError(f"{path} is larger than what was compiled; {_AGAIN}") from error
            raise ArtifactError(f"{path} cannot be read ({error.strerror}); {_AGAIN}") from error
        if facts is not None and (len(data) != facts.num_bytes or hashlib.sha256(data).hexdigest() != facts.sha256):
            raise ArtifactError(f"{path} is not what was compiled (its size or sha256 differs); {_AGAIN}")
        return data

    def _list(self, handle: int, prefix: str, depth: int, found: set[str]) -> None:
        with os.scandir(handle) as entries:
            for entry in entries:
                name = prefix + entry.name
                status = os.stat(entry.name, dir_fd=handle, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) and depth < _MAX_DEPTH:
                    _check_status(self.path / name, status)
                    child = os.open(entry.name, _DIRECTORY_FLAGS | os.O_NOFOLLOW, dir_fd=handle)
                    try:
                        self._list(child, name + "/", depth + 1, found)
                    finally:
                        os.close(child)
                elif stat.S_ISREG(status.st_mode) and len(found) < MAX_FILES:
                    _check_status(self.path / name, status)
                    found.add(name)
                else:
                    raise ArtifactError(f"{self.path / name} is no file that this version writes; {_AGAIN}")


def _check_status(path: Path, status: os.stat_result) -> None:
    """Refuses files that are not ours (or root's), or that others may write to: they are executed."""
    if status.st_uid not in (os.geteuid(), 0):
        raise ArtifactError(f"{path} belongs to user id {status.st_uid}, not to you: what is in it is not executed")
    if status.st_mode & 0o022:
        raise ArtifactError(f"{path} can be written by others (mode {status.st_mode & 0o777:o}): run chmod go-w on it")
