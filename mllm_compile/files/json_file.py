"""Reads the files that came with a model: any damage is an error of the caller's kind, with the next step.

Files of a runtime come as checked bytes (artifact.py); files of a model's folder are read here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mllm_compile.errors import MllmError
from mllm_compile.runtime.files.json_data import parse_json
from mllm_compile.runtime.files.regular_file import read_regular

MAX_TEXT_BYTES = 256 << 20  # of a tokenizer.json; the largest known has 35 MiB
MAX_JSON_BYTES = 64 << 20
# The escape of half a character: a pair is one, a half alone is a text that neither logs nor tokenizers take.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class FileReader(Protocol):
    """The files of a folder."""

    def __call__(self, name: str) -> bytes | None:
        """The file of that name, None if the folder has none."""

    def names_in(self, subfolder: str) -> list[str]:
        """The names of a subfolder's files, sorted; none where there is no such subfolder."""


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
        error_class: it is no JSON within the bounds of parse_json, holds something other than an object, or a text
            that is no Unicode.
    """
    try:
        content = parse_json(data)
        if _SURROGATE.search(data):
            json.dumps(content, ensure_ascii=False).encode()
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


@dataclass(frozen=True)
class FolderReader:
    """Reads files of `folder` when they are asked for.

    Raises:
        error_class: as read_file.
    """

    folder: Path
    error_class: type[MllmError]

    def __call__(self, name: str) -> bytes | None:
        return read_file(self.folder / name, self.error_class)

    def names_in(self, subfolder: str) -> list[str]:
        path = self.folder / subfolder
        try:
            return sorted(found.name for found in path.iterdir() if found.is_file())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self.error_class(f"{path} cannot be read: {error.strerror or error}. Download it again.") from None


@dataclass(frozen=True)
class HeldFiles:
    """Gives the `files` whose names begin with `prefix`, by the rest of the name."""

    files: Mapping[str, bytes]
    prefix: str = ""

    def __call__(self, name: str) -> bytes | None:
        return self.files.get(self.prefix + name)

    def names_in(self, subfolder: str) -> list[str]:
        start = f"{self.prefix}{subfolder}/"
        return sorted(name.removeprefix(start) for name in self.files if name.startswith(start))
