"""Checks paths that a command will write to before its work: a mistyped folder must not cost a whole run."""

from __future__ import annotations

import os
from pathlib import Path

from mllm_compile.errors import ConfigError


def check_output_file(option: str, path: Path | None) -> None:
    """Refuses a path that cannot be written. Makes and changes nothing; None, an option not given, is fine.

    Raises:
        ConfigError: no file can be written there.
    """
    if path is None:
        return
    if os.path.isdir(path):
        raise ConfigError(f"{option} {path} is a folder; expected a file. Give the name of a file in it.")
    if os.path.exists(path):
        _check_writable(option, path, path, os.W_OK)
    elif not os.path.isdir(path.parent):
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}. Make it first, or give another path.")
    else:
        _check_writable(option, path, path.parent, os.W_OK | os.X_OK)


def check_output_folder(option: str, path: Path) -> None:
    """Like check_output_file, for a folder; what is missing of its path can be made.

    Raises:
        ConfigError: there can be no folder, or no file in it.
    """
    existing = next(place for place in (path, *path.parents) if os.path.exists(place))
    if not os.path.isdir(existing):
        raise ConfigError(f"{option} {path}: {existing} is a file; expected a folder. Give another path.")
    _check_writable(option, path, existing, os.W_OK | os.X_OK)


def _check_writable(option: str, path: Path, place: Path, mode: int) -> None:
    if not os.access(place, mode):
        raise ConfigError(f"{option} {path}: {place} is not writable for you. Change its mode, or give another path.")
