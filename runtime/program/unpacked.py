"""The folder that a process unpacks its pieces into: its own, gone with it, and swept by the next one if it was killed.

It is in the folder for temporary files, with mode 0700, and is locked while its process lives; the kernel releases
the lock however that ends. So a folder of ours without a lock is what a killed process left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import shutil
import stat
import tempfile
import threading
import weakref
import zipfile
from collections.abc import Iterator
from pathlib import Path

from mllm_compile.runtime.errors import ConfigError
from mllm_compile.runtime.files.disk_space import describe_full, is_full

_PREFIX = "mllm-pieces-"
_lock = threading.Lock()
_folder: _PrivateFolder | None = None


class Unpacked:
    """A package's members as files.

    Attributes:
        path: the folder; it is removed with this object.

    Raises:
        ConfigError: there is no room for it.
    """

    def __init__(self, package: bytes) -> None:
        """`package` is a zip whose members' names were checked."""
        parent = _private_folder()
        with zipfile.ZipFile(io.BytesIO(package)) as archive:
            needed = sum(member.file_size for member in archive.infolist())
            try:
                self.path = Path(tempfile.mkdtemp(dir=parent))
                self._remove = weakref.finalize(self, _remove, self.path, os.getpid())
                archive.extractall(self.path)
            except OSError as error:
                if hasattr(self, "_remove"):
                    self._remove()
                raise _refusal(error, needed) from error


def _refusal(error: OSError, needed_bytes: int | None = None) -> ConfigError:
    temporary = Path(tempfile.gettempdir())
    if is_full(error):
        said, remedy = describe_full(error, temporary, needed_bytes), "Free space, or set TMPDIR."
    else:
        said, remedy = f"{temporary} cannot be written ({error.strerror or error})", "Set TMPDIR."
    return ConfigError(f"{said}: pieces are unpacked there. {remedy}")


def check_room(package: bytes) -> None:
    """Checks that /tmp has room, for a loader that unpacks there by itself.

    Raises:
        ConfigError: there is no room for it.
    """
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        needed = sum(member.file_size for member in archive.infolist())
    status = os.statvfs("/tmp")
    if status.f_bavail * status.f_frsize < needed:
        said = describe_full(OSError(errno.ENOSPC, ""), Path("/tmp"), needed)
        raise ConfigError(f"{said}: pieces are unpacked there. Free space.")


class _PrivateFolder:
    """This process' folder, locked while it lives."""

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))  # mode 0700
            self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if _is_locked_now(self._handle, self.path):
                break
            os.close(self._handle)  # another process' sweep was faster
        self.process = os.getpid()
        weakref.finalize(self, _remove, self.path, self.process)


def _private_folder() -> Path:
    """The process' folder, made at the first call, which removes killed processes' folders."""
    global _folder
    with _lock:
        if _folder is None or _folder.process != os.getpid() or not _folder.path.is_dir():
            sweep()
            try:
                _folder = _PrivateFolder()
            except OSError as error:
                raise _refusal(error) from error
        return _folder.path


def sweep() -> None:
    """Removes this user's folders whose processes have ended."""
    for path in _folders(Path(tempfile.gettempdir())):
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if os.fstat(handle).st_uid == os.geteuid() and _is_locked_now(handle, path, needs_lock=True):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(handle)


def _folders(temporary: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(temporary) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and stat.S_ISDIR(entry.stat(follow_symlinks=False).st_mode):
                yield Path(entry.path)


def _is_locked_now(handle: int, path: Path, *, needs_lock: bool = False) -> bool:
    """Takes the lock of the folder that `path` still names; on a file system without locks: not `needs_lock`."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return not needs_lock
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False))
    return False


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # and not a fork of it
        shutil.rmtree(path, ignore_errors=True)
