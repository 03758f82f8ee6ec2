"""The places where runtimes are written: their names for users, and advice if the system refuses to write there."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mllm_compile.errors import ConfigError
from mllm_compile.runtime.files.disk_space import describe_full, is_full

_MAKE_ROOM = "make room (mllm-compile cache prune removes what is not needed)"


@dataclass(frozen=True)
class Place:
    """A place that a user had something written to, for the errors of doing so.

    Attributes:
        name: the user's name for it.
        folder: where it is.
        remedy: the advice for when it cannot be written.
    """

    name: str
    folder: Path
    remedy: str

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turns errors of the system in the body into a ConfigError."""
        try:
            yield
        except OSError as error:
            raise self._cannot_write(error) from error

    @contextmanager
    def filling(self, folder: Path) -> Iterator[None]:
        """Turns only a full disk into one: the body, which writes into `folder`, reads and writes elsewhere too."""
        try:
            yield
        except OSError as error:
            if not is_full(error):
                raise
            # A copy names what it reads first.
            files = [Path(os.fsdecode(name)) for name in (error.filename2, error.filename) if name is not None]
            if not files or any(file.is_relative_to(folder) for file in files):
                raise self._cannot_write(error) from error
            place = files[0] if files[0].is_dir() else files[0].parent
            remedy = "set TMPDIR to another" if files[0].is_relative_to(tempfile.gettempdir()) else self.remedy
            raise ConfigError(
                f"{files[0]} cannot be written: {describe_full(error, place)}; {_MAKE_ROOM}, or {remedy}"
            ) from error

    def _cannot_write(self, error: OSError) -> ConfigError:
        if is_full(error):
            return ConfigError(
                f"{self.name} cannot be written: {describe_full(error, self.folder)}; {_MAKE_ROOM}, or {self.remedy}"
            )
        return ConfigError(f"{self.name} cannot be written ({error.strerror or error}); {self.remedy}")


def place_of(final: Path, *, is_output: bool) -> Place:
    """
    Args:
        final: where a runtime is to be.
        is_output: --output named it; otherwise it is one of a cache.
    """
    if is_output:
        return Place(f"--output {final}", final.parent, "give --output a folder of yours")
    return cache_place(final.parent.parent)


def cache_place(folder: Path) -> Place:
    """The place of a cache as a whole."""
    return Place(f"cache.dir {folder}", folder, "set cache.dir, or MLLM_COMPILE_CACHE, to a folder of yours")


def make_folder(folder: Path) -> None:
    """Makes `folder` and its parents, if it is not there yet.

    Raises:
        OSError: it cannot be made; NotADirectoryError where a file is in the way.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # a file is there: "File exists" would not say what is wrong with that
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error
