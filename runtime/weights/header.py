"""Reads the header of a weight file, safetensors or GGUF, and finds tensors in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from mllm_compile.runtime.errors import CheckpointError
from mllm_compile.runtime.files.regular_file import open_regular
from mllm_compile.runtime.weights.file_names import is_gguf
from mllm_compile.runtime.weights.gguf_header import read_gguf
from mllm_compile.runtime.weights.safetensors_header import read_safetensors
from mllm_compile.runtime.weights.tensor_entry import TensorEntry, WeightHeader


def read_header(path: Path) -> WeightHeader:
    """Reads and checks the header of `path`; its name says which format it has.

    Raises:
        CheckpointError: the file is missing, truncated or not of its format; the message says which and what to do.
    """
    return read_gguf(path) if is_gguf(path) else read_safetensors(path)


def read_bytes(path: Path, entry: TensorEntry) -> bytes:
    """The bytes of one small tensor.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        with open(open_regular(path), "rb") as file:
            file.seek(entry.begin)
            return file.read(entry.end - entry.begin)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


def entry_of(
    folder: Path,
    headers: Mapping[str, WeightHeader],
    file: str,
    tensor: str,
    shape: tuple[int, ...],
    dtype: torch.dtype | None = None,
) -> TensorEntry:
    """The tensor's place in its file; `dtype` is None where any is converted."""
    entry = headers[file].tensors.get(tensor)
    if entry is None or entry.shape != shape or dtype not in (None, entry.dtype):
        found = "no such tensor" if entry is None else f"shape {list(entry.shape)}"
        if entry is not None and entry.shape == shape:
            found = str(entry.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{folder / file}: expected tensor {tensor!r} of shape {list(shape)}"
            f"{'' if dtype is None else ' in ' + str(dtype).removeprefix('torch.')}, found {found}. The checkpoint "
            "has changed since the model was compiled; compile it again."
        )
    return entry
