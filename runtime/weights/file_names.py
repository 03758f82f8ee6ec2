"""The format of a weight file by its name, and that name. Nothing else is imported: every start asks this."""

from __future__ import annotations

import os
from pathlib import Path, PurePath

GGUF_SUFFIX = ".gguf"


def is_gguf(path: PurePath) -> bool:
    """True if the file is a GGUF one by its name."""
    return path.suffix == GGUF_SUFFIX


def name_from(root: Path, path: Path) -> str:
    """A file's name from a folder, which it may be outside of: links in either's way are followed first."""
    if path.is_relative_to(root):
        return path.relative_to(root).as_posix()
    folder = os.path.relpath(os.path.realpath(path.parent), os.path.realpath(root))
    return PurePath(folder, path.name).as_posix()
