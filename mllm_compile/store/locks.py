"""Locks between processes, for compiling a key and for using the compilers' cache.

The compilers' cache is beside the runtimes. All compiles that use it share a lock; removing it takes
that lock alone. Where the file system has no locks, two compiles of one key both do the work, and nothing is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mllm_compile.files.cache_folders import compiler_cache
from mllm_compile.files.writable_place import Place, cache_place, make_folder, place_of


@contextmanager
def using_compiler_cache(cache_dir: str | Path) -> Iterator[Path]:
    """Gives the folder that compilers keep files in to their caller; `prune` leaves it alone meanwhile.

    Raises:
        ConfigError: `cache_dir` cannot be written.
    """
    folder = compiler_cache(cache_dir)
    with cache_place(folder.parent).writing():
        make_folder(folder.parent)
        handle = open_lock(compiler_lock(folder))
    try:
        with contextlib.suppress(OSError):  # no locks on this file system: then `prune` removes nothing
            fcntl.flock(handle, fcntl.LOCK_SH)  # waits for a `prune` that is removing it: seconds
        yield folder
    finally:
        os.close(handle)


def compiler_lock(folder: Path) -> Path:
    """The lock beside the folder, which outlives it; it is never removed, or two could hold locks of one name."""
    return folder.with_name(f".{folder.name}.lock")


def open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


@contextmanager
def compile_lock(final: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the right to compile into `final`, which is in a cache; `waiting` is called once when another has it.

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
        path.unlink(missing_ok=True)  # while it is locked: a waiting process sees that it is gone, and makes another
        os.close(handle)


def _lock_file(path: Path, place: Place, waiting: Callable[[], None]) -> int:
    has_told = False
    while True:
        with place.writing():
            handle = open_lock(path)
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


def is_free(handle: int) -> bool:
    """Takes the lock if it is free. A file system without locks cannot tell: then it is not free."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
