"""Reads the header of a safetensors file: names, dtypes, shapes and byte ranges, without touching the data.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON object, the data.
"""

from __future__ import annotations

import math
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from mllm_compile.runtime.errors import CheckpointError
from mllm_compile.runtime.files.json_data import parse_json
from mllm_compile.runtime.files.regular_file import open_regular
from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.runtime.weights.tensor_entry import TensorEntry, WeightHeader, broken

_MAX_HEADER_BYTES = 100 * 1024 * 1024  # the format's own limit
_HEADERS = 128  # that are remembered: some MB, of many experts
_LFS_POINTER = b"version https://git-lfs"  # how such a file begins
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def read_safetensors(path: Path, *, is_kept: bool = True) -> WeightHeader:
    """Reads and checks the header of `path`.

    Args:
        is_kept: it is remembered, for the next time.

    Raises:
        CheckpointError: the file is missing, truncated or not safetensors; the message says which and what to do.
    """
    try:
        with open(open_regular(path), "rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            begin = file.read(8)
            length = int.from_bytes(begin, "little")
            if begin == _LFS_POINTER[:8]:
                raise CheckpointError(
                    f"{path} is a Git LFS pointer and not the weights. Run `git lfs pull` in its repository, or "
                    "download the file itself."
                )
            if file_bytes < 8 or not 2 <= length <= min(_MAX_HEADER_BYTES, file_bytes - 8):
                raise CheckpointError(broken(path, f"its header would be {length} bytes of a file of {file_bytes}"))
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    tensors_of = _tensors if is_kept else _tensors.__wrapped__
    return WeightHeader(tensors_of(path, raw, file_bytes), raw, file_bytes)


@lru_cache(maxsize=_HEADERS)
def _tensors(path: Path, raw: bytes, file_bytes: int) -> dict[str, TensorEntry]:
    """The tensors of the header `raw`: a start looks at it several times, and one of experts names thousands."""
    return {
        name: _entry(path, name, fields, 8 + len(raw), file_bytes)
        for name, fields in _parse(path, raw).items()
        if name != "__metadata__"
    }


def _parse(path: Path, raw: bytes) -> dict[str, dict[str, Any]]:
    try:
        header = parse_json(raw)
    except ValueError as error:
        raise CheckpointError(broken(path, f"its header is not JSON that can be read: {error}")) from error
    if not isinstance(header, dict) or not all(isinstance(fields, dict) for fields in header.values()):
        raise CheckpointError(broken(path, "its header is not an object of objects"))
    return header


def _entry(path: Path, name: str, fields: dict[str, Any], data_start: int, file_bytes: int) -> TensorEntry:
    dtype_name, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise CheckpointError(f"{path}: tensor {name!r} has dtype {short_repr(dtype_name)}; known: {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not isinstance(offsets, list) or not _are_sizes(shape, offsets):
        raise CheckpointError(broken(path, f"tensor {name!r} has shape {short_repr(shape)} at {short_repr(offsets)}"))
    begin, end = data_start + offsets[0], data_start + offsets[1]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(broken(path, f"tensor {name!r} of shape {shape} takes {end - begin} bytes"))
    if end > file_bytes:
        raise CheckpointError(broken(path, f"tensor {name!r} ends at byte {end} of a file of {file_bytes}"))
    return TensorEntry(dtype, tuple(shape), begin, end)


def _are_sizes(shape: list[Any], offsets: list[Any]) -> bool:
    # Exactly int: json reads true as a bool, which is an int too. torch has 64 dimensions and 64-bit sizes.
    values = shape + offsets
    are_ints = len(shape) <= 64 and len(offsets) == 2 and set(map(type, values)) == {int}
    return are_ints and min(values) >= 0 and max(values) < 2**63
