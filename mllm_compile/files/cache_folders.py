"""The place of a cache and the purpose of its folders; imports nothing heavy."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from mllm_compile.errors import ConfigError
from mllm_compile.files.user_path import is_homeless, user_path
from mllm_compile.files.writable_place import cache_place

RUNTIMES = "runtimes"
CHECKPOINTS = "checkpoints"  # that a node of Ray has fetched
FETCHED = "fetched-"  # how their names begin: in a folder that is no cache, other checkpoints are another program's
CACHE_VARIABLE = "MLLM_COMPILE_CACHE"


def auto_cache_dir() -> tuple[str, str]:
    """The default cache, an absolute path, and why it is that one.

    Raises:
        ConfigError: nothing says where.
    """
    if folder := os.environ.get(CACHE_VARIABLE):
        return _absolute(folder, CACHE_VARIABLE), f"${CACHE_VARIABLE}"
    if base := os.environ.get("XDG_CACHE_HOME"):
        return _absolute(os.path.join(base, "mllm_compile"), "XDG_CACHE_HOME"), "$XDG_CACHE_HOME"
    try:
        return str(Path.home() / ".cache" / "mllm_compile"), "the user's cache"
    except RuntimeError as error:  # a user without a home
        raise ConfigError(f"nothing says where the cache is ({error}): set cache.dir, or {CACHE_VARIABLE}") from error


def _absolute(folder: str, variable: str) -> str:
    if is_homeless(folder):
        raise ConfigError(f"${variable} leads to {folder!r}, and there is no such home. Give a path from / on.")
    return os.path.abspath(user_path(folder))


def compiler_cache(cache_dir: str | Path) -> Path:
    """The folder of Inductor's and Triton's files between compiles; it can be removed while nothing compiles."""
    return Path(cache_dir) / "compilers"


def bytecode_cache(cache_dir: str | Path) -> Path:
    """The folder of Python's bytecode, where the installation has none; it can be removed at any time."""
    return Path(cache_dir) / "bytecode"


def make_private(folder: Path) -> None:
    """Makes a folder for what is executed later, or checks the one that is there.

    Raises:
        ConfigError: it cannot be made, is no folder, belongs to another user, or others can write to it.
    """
    with cache_place(folder.parent).writing(), contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"{folder} is no folder, belongs to another user or can be written by others; what compilers keep there is "
            "executed. Remove it, or set cache.dir to a folder of your own."
        )
