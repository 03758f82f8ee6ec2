"""The files of one GGUF model, by their names: NAME.gguf, or NAME-00001-of-00003.gguf and its other parts."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path

from mllm_compile.errors import CheckpointError, ModelNotFoundError
from mllm_compile.runtime.weights.file_names import is_gguf

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_NO_MODEL = re.compile(r"(?:^|[-._])(?:mmproj|imatrix)(?:[-._]|$)", re.IGNORECASE)  # projectors of images, statistics
_MAX_PARTS = 999
_log = logging.getLogger("mllm_compile.gguf")


def is_named_as_model(name: str) -> bool:
    """False for a file that lies beside a model by its name, such as `mmproj-F16.gguf` or `Tiny-mmproj-f16.gguf`."""
    return _NO_MODEL.search(name) is None


def first_parts(names: Iterable[str]) -> list[str]:
    """The names without those of second and further parts."""
    return [name for name in names if (part := _PART.fullmatch(name)) is None or int(part[2]) == 1]


def part_names(name: str) -> list[str]:
    """The names of all parts of a model, by that of any; of a whole model its own.

    Raises:
        CheckpointError: no set has such a part.
    """
    if (part := _PART.fullmatch(name)) is None:
        return [name]
    count = int(part[3])
    if not 1 <= int(part[2]) <= count <= _MAX_PARTS:
        raise CheckpointError(f"{name} is named as part {int(part[2])} of {count}; expected 1 to {_MAX_PARTS} parts.")
    return [f"{part[1]}-{index:05}-of-{part[3]}.gguf" for index in range(1, count + 1)]


def gguf_parts(path: Path) -> tuple[Path, ...] | None:
    """The GGUF files that a path names: a file, a part of several, or a folder with one model; None: it names none.

    Raises:
        ModelNotFoundError: the folder has several models.
        CheckpointError: a part is missing.
    """
    if path.is_dir():
        names = sorted(one.name for one in path.iterdir() if is_gguf(one))
        if not names:
            return None
        firsts = first_parts(filter(is_named_as_model, names))
        if len(firsts) != 1:
            shown = ", ".join((firsts or names)[:4])
            raise ModelNotFoundError(f"{path} holds several GGUF models or none whole ({shown}). Name one file.")
        if beside := [name for name in names if not is_named_as_model(name)]:
            _log.info("%s: %s is taken, and %s left out, which holds no model", path, firsts[0], ", ".join(beside))
        path = path / firsts[0]
    if not is_gguf(path):
        return None
    parts = tuple(path.with_name(name) for name in part_names(path.name))
    missing = [one for one in parts if not one.is_file()]
    if missing and len(parts) > 1:
        raise CheckpointError(
            f"{path}: {len(missing)} of {len(parts)} parts are missing, first {missing[0].name}. Download them into "
            "one folder."
        )
    return parts
