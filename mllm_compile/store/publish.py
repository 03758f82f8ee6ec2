"""The places of runtime folders, and how one gets there whole: one compile of a key at a time, a rename at the end.

A compile writes into a scratch folder beside the final place, which it keeps locked; the kernel gives the lock back
however the process ends. So an unlocked scratch folder is what a killed compile left, and the next one removes it.
Where the file system has no locks, two compiles of one key both do the work, and one wins.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mllm_compile.errors import ConfigError
from mllm_compile.files.cache_folders import RUNTIMES
from mllm_compile.files.writable_place import Place, cache_place, make_folder, place_of
from mllm_compile.store.artifact import is_runtime, read_manifest, set_modes
from mllm_compile.store.locks import compiler_lock, is_free, open_lock


def runtimes_folder(cache_dir: str | Path) -> Path:
    return Path(cache_dir) / RUNTIMES


@contextmanager
def new_artifact_folder(final: Path, *, is_output: bool = False) -> Iterator[Path]:
    """A private folder to write into; it takes the place of `final` when the body ends well, and is removed otherwise.

    Args:
        final: the place; it must not hold a whole runtime that is wanted.
        is_output: --output named it: in the end all may read it. Otherwise it is one of a cache, and stays private.

    Raises:
        ConfigError: it cannot be written, or the disk is full.
    """
    place = place_of(final, is_output=is_output)
    with scratch_folder(final, place) as scratch:
        with place.filling(scratch):
            yield scratch
        with place.writing():
            set_modes(scratch)
            os.chmod(scratch, 0o755 if is_output else 0o700)
            _publish(scratch, final)


@contextmanager
def scratch_folder(final: Path, place: Place) -> Iterator[Path]:
    """A private folder beside `final`, which is locked and removed at the end; `sweep` removes a killed one's.

    Raises:
        ConfigError: it cannot be made.
    """
    with place.writing():
        scratch, lock = _make_scratch(final)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def check_replaceable(folder: Path) -> None:
    """Refuses to put a runtime, with --output, where something else is.

    Raises:
        ConfigError: `folder` is a file, or a folder that holds something and is no runtime, or cannot be looked into.
    """
    with place_of(folder, is_output=True).writing():
        if not folder.exists():
            return
        if not folder.is_dir() or (any(folder.iterdir()) and not is_runtime(folder)):
            raise ConfigError(f"{folder} exists and is no runtime: it is not replaced. Give a new or an empty folder.")


def _make_scratch(final: Path) -> tuple[Path, int]:
    """Makes the folder and the handle that locks it. The store is locked meanwhile: no sweep comes between."""
    make_folder(final.parent)
    with _store_lock(final.parent):
        scratch = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".part", dir=final.parent))  # mode 0700
        lock = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return scratch, lock


def _publish(scratch: Path, final: Path) -> None:
    """Renames; an earlier runtime there (damaged, or an older one of --output) is moved away first and removed."""
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


def sweep(folder: Path) -> list[int]:
    """Removes what killed processes left in a folder of a cache; returns how many bytes each scratch gave back.

    Raises:
        ConfigError: the folder cannot be looked into.
    """
    with cache_place(folder.parent).writing():
        if not folder.is_dir():
            return []
        with _store_lock(folder):
            return [remove_folder(scratch) for scratch in folder.glob(".*.part") if _is_abandoned(scratch)]


def _is_abandoned(scratch: Path) -> bool:
    try:
        handle = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return is_free(handle)
    finally:
        os.close(handle)


def remove_folder(folder: Path) -> int:
    """Removes `folder`; returns the bytes that are gone, not all of them if something cannot be removed."""
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
    """Removes it and returns the bytes freed: 0 if it has no lock of ours, None while a compile may be using it."""
    if not (folder.is_dir() and compiler_lock(folder).is_file()):
        return 0
    with cache_place(folder.parent).writing():
        handle = open_lock(compiler_lock(folder))
    try:
        return remove_folder(folder) if is_free(handle) else None
    finally:
        os.close(handle)
