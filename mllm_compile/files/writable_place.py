"""Where runtimes are written: what a user calls that place, and what to do when the system refuses to write there."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mllm_compile.errors import ConfigError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_MAKE_ROOM = "make room (mllm-compile cache prune removes what is not needed)"


@dataclass(frozen=True)
class Place:
    """Where a user had something written, for the errors of doing so.

    Attributes:
        name: what the user calls it.
        remedy: what to do when it cannot be written.
    """

    name: str
    remedy: str

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Whatever the system refuses in the body is a ConfigError."""
        try:
            yield
        except OSError as error:
            raise self._cannot_write(error) from error

    @contextmanager
    def filling(self, folder: Path) -> Iterator[None]:
        """Only a full disk is: the body, which writes into `folder`, reads and writes elsewhere too."""
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                raise
            # A copy names what it reads first.
            files = [Path(os.fsdecode(name)) for name in (error.filename2, error.filename) if name is not None]
            if not files or any(file.is_relative_to(folder) for file in files):
                raise self._cannot_write(error) from error
            raise ConfigError(f"{files[0]} cannot be written ({error.strerror}); {_MAKE_ROOM}") from error

    def _cannot_write(self, error: OSError) -> ConfigError:
        room = f"{_MAKE_ROOM}, or " if error.errno in _FULL else ""
        return ConfigError(f"{self.name} cannot be written ({error.strerror or error}); {room}{self.remedy}")


def place_of(final: Path, *, is_output: bool) -> Place:
    """
    Args:
        final: where a runtime is to lie.
        is_output: --output named it; otherwise it is one of a cache.
    """
    if is_output:
        return Place(f"--output {final}", "give --output a folder of yours")
    return cache_place(final.parent.parent)


def cache_place(folder: Path) -> Place:
    """Of a cache as a whole."""
    return Place(f"cache.dir {folder}", "set cache.dir, or MLLM_COMPILE_CACHE, to a folder of yours")


def make_folder(folder: Path) -> None:
    """With its parents, where it is not there yet.

    Raises:
        OSError: it cannot be made; NotADirectoryError where a file is in the way.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # a file is there: "File exists" would not say what is wrong with that
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error
