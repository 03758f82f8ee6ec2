"""The place of a tensor in a weight file, and what a file's header says, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch


class TensorEntry(NamedTuple):
    """The place of one tensor: bytes [begin, end) of its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class WeightHeader:
    """A file's tensors by name, the raw header bytes (what a reference to it is hashed by), and the file's size."""

    tensors: Mapping[str, TensorEntry]
    raw: bytes
    file_bytes: int


def broken(path: Path, why: str) -> str:
    """The message on a file that cannot be read as its format."""
    return f"{path} is truncated or corrupt: {why}. Download it again."
