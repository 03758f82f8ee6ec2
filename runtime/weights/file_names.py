"""The format of a weight file, by its name. Nothing else is imported: every start asks this."""

from __future__ import annotations

from pathlib import PurePath

GGUF_SUFFIX = ".gguf"


def is_gguf(path: PurePath) -> bool:
    """True if the file is a GGUF one by its name."""
    return path.suffix == GGUF_SUFFIX
