"""Reads the files that came with a model: any damage is an error of the caller's kind, with the next step.

Files of a runtime come as the bytes that were checked (artifact.py); those of a model's folder are read here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mllm_compile.errors import MllmError
from mllm_compile.runtime.json_data import parse_json
from mllm_compile.runtime.regular_file import read_regular

MAX_TEXT_BYTES = 256 << 20  # of a tokenizer.json; the largest known has 35 MiB
MAX_JSON_BYTES = 64 << 20

FileReader = Callable[[str], bytes | None]
"""Returns a folder's file by its name, None if the folder has none of that name."""


def read_file(path: Path, error_class: type[MllmError], max_bytes: int = MAX_TEXT_BYTES) -> bytes | None:
    """The bytes of a regular file, None when there is no such file.

    Raises:
        error_class: it cannot be read, is no regular file, or holds more than `max_bytes`.
    """
    try:
        return read_regular(path, max_bytes)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise error_class(f"{path} cannot be read: {error.strerror or error}. Download it again.") from None


def json_object(data: bytes, path: Path, error_class: type[MllmError]) -> dict[str, Any]:
    """The JSON object in `data`, which is the file `path`'s.

    Raises:
        error_class: it is no JSON within the bounds of parse_json, or holds something other than an object.
    """
    try:
        content = parse_json(data)
    except ValueError as error:
        raise error_class(f"{path} cannot be read as JSON: {error}. Download it again.") from None
    if not isinstance(content, dict):
        raise error_class(f"{path} holds no JSON object. Download it again.")
    return content


def read_json_object(path: Path, error_class: type[MllmError]) -> dict[str, Any] | None:
    """The object in a JSON file, None if there is no such file.

    Raises:
        error_class: as read_file and json_object.
    """
    data = read_file(path, error_class, MAX_JSON_BYTES)
    return None if data is None else json_object(data, path, error_class)


def folder_reader(folder: Path, error_class: type[MllmError]) -> FileReader:
    """Reads files of `folder` when they are asked for.

    Raises:
        error_class: as read_file, from the reader.
    """
    return lambda name: read_file(folder / name, error_class)


def held_files(files: Mapping[str, bytes], prefix: str = "") -> FileReader:
    """Gives those of `files` whose names begin with `prefix`, by the rest of the name."""
    return lambda name: files.get(prefix + name)
