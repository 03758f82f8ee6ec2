"""The places of runtime folders, and how one gets there whole: one compile of a key at a time, a rename at the end.

A compile writes into a scratch folder beside the final place, which it keeps locked; the kernel gives the lock back
however the process ends. So an unlocked scratch folder is what a killed compile left, and the next one removes it.
Where the file system has no locks, two compiles of one key both do the work, and one wins.

What compilers keep between compiles lies beside the runtimes. All compiles that use it share a lock; removing it
takes that lock alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mllm_compile.errors import ConfigError
from mllm_compile.files.cache_folders import RUNTIMES, compiler_cache
from mllm_compile.files.writable_place import Place, cache_place, make_folder, place_of
from mllm_compile.store.artifact import is_runtime, read_manifest, set_modes


@contextmanager
def using_compiler_cache(cache_dir: str | Path) -> Iterator[Path]:
    """Gives the folder that compilers keep files in to their caller; `prune` leaves it alone meanwhile.

    Raises:
        ConfigError: `cache_dir` cannot be written.
    """
    folder = compiler_cache(cache_dir)
    with cache_place(folder.parent).writing():
        make_folder(folder.parent)
        handle = _open_lock(_compiler_lock(folder))
    try:
        with contextlib.suppress(OSError):  # no locks on this file system: then `prune` removes nothing
            fcntl.flock(handle, fcntl.LOCK_SH)  # waits for a `prune` that is removing it: seconds
        yield folder
    finally:
        os.close(handle)


def _compiler_lock(folder: Path) -> Path:
    """The lock beside the folder, which outlives it; it is never removed, or two could hold locks of one name."""
    return folder.with_name(f".{folder.name}.lock")


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def runtimes_folder(cache_dir: str | Path) -> Path:
    return Path(cache_dir) / RUNTIMES


@contextmanager
def compile_lock(final: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the right to compile into `final`, which lies in a cache; `waiting` is called once when another has it.

    Raises:
        ConfigError: the cache cannot be written.
    """
    path = final.parent / f".{final.name}.lock"
    place = place_of(final, is_output=False)
    with place.writing():
        make_folder(final.parent)
    handle = _lock_file(path, place, waiting)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is locked: who waits for it sees that it is gone, and makes another
        os.close(handle)


def _lock_file(path: Path, place: Place, waiting: Callable[[], None]) -> int:
    has_told = False
    while True:
        with place.writing():
            handle = _open_lock(path)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not has_told:
                waiting()
                has_told = True
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            return handle  # no locks on this file system
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        os.close(handle)


@contextmanager
def new_artifact_folder(final: Path, *, is_output: bool = False) -> Iterator[Path]:
    """A private folder to write into; it takes the place of `final` when the body ends well, and is removed otherwise.

    Args:
        final: the place; what lies there must be no whole runtime that is wanted.
        is_output: --output named it: in the end all may read it. Otherwise it is one of a cache, and stays private.

    Raises:
        ConfigError: it cannot be written, or the disk is full.
    """
    place = place_of(final, is_output=is_output)
    with place.writing():
        scratch, lock = _make_scratch(final)
    try:
        with place.filling(scratch):
            yield scratch
        with place.writing():
            set_modes(scratch)
            os.chmod(scratch, 0o755 if is_output else 0o700)
            _publish(scratch, final)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def check_replaceable(folder: Path) -> None:
    """Refuses to put a runtime, with --output, where something else lies.

    Raises:
        ConfigError: `folder` is a file, or a folder that holds something and is no runtime, or cannot be looked into.
    """
    with place_of(folder, is_output=True).writing():
        if not folder.exists():
            return
        if not folder.is_dir() or (any(folder.iterdir()) and not is_runtime(folder)):
            raise ConfigError(f"{folder} exists and is no runtime: it is not replaced. Give a new or an empty folder.")


def _make_scratch(final: Path) -> tuple[Path, int]:
    """The folder and the handle that keeps it locked. The store is locked meanwhile: no sweep comes between."""
    make_folder(final.parent)
    with _store_lock(final.parent):
        scratch = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".part", dir=final.parent))  # mode 0700
        lock = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return scratch, lock


def _publish(scratch: Path, final: Path) -> None:
    """Renames; what lay there before (damaged, or an older one of --output) is moved away first and removed."""
    try:
        os.rename(scratch, final)  # also onto an empty folder
        return
    except OSError:
        old = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".part", dir=final.parent))
    try:
        with contextlib.suppress(FileNotFoundError):
            os.rename(final, old)
        os.rename(scratch, final)
    except OSError:  # another process was first: its folder is as good as ours, if it is whole and of the same
        if read_manifest(final).factors != read_manifest(scratch).factors:
            raise ConfigError(f"{final}: another process has put a runtime of something else there") from None
    finally:
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _store_lock(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def sweep(runtimes: Path) -> list[int]:
    """Removes what killed compiles left; returns how many bytes each folder gave back.

    Raises:
        ConfigError: the folder of runtimes cannot be looked into.
    """
    with cache_place(runtimes.parent).writing():
        if not runtimes.is_dir():
            return []
        with _store_lock(runtimes):
            return [remove_folder(scratch) for scratch in runtimes.glob(".*.part") if _is_abandoned(scratch)]


def _is_abandoned(scratch: Path) -> bool:
    try:
        handle = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return _is_free(handle)
    finally:
        os.close(handle)


def _is_free(handle: int) -> bool:
    """Takes the lock if it is free. A file system without locks cannot tell: then it is not free."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def remove_folder(folder: Path) -> int:
    """Returns the bytes that are gone, which are not all where something cannot be removed."""
    before = folder_bytes(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return before - folder_bytes(folder)


def mark_used(folder: Path) -> None:
    """Notes the time for `prune`; nothing else looks at it."""
    with contextlib.suppress(OSError):
        os.utime(folder)


def folder_bytes(folder: Path) -> int:
    """Total bytes of the files below `folder`; 0 if it does not exist. Skips files removed meanwhile."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(root, name)).st_size
    return total


def remove_compiler_cache(folder: Path) -> int | None:
    """Returns what that freed, None where a compile may be using it. Without the lock of a compile it is not ours."""
    if not (folder.is_dir() and _compiler_lock(folder).is_file()):
        return 0
    with cache_place(folder.parent).writing():
        handle = _open_lock(_compiler_lock(folder))
    try:
        return remove_folder(folder) if _is_free(handle) else None
    finally:
        os.close(handle)
