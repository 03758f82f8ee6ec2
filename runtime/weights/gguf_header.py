"""Reads the header of a GGUF file: metadata, names, types, shapes and byte ranges, without touching the data.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), is little endian: magic, version u32, number of
tensors u64, number of keys u64. Then keys with typed values; tensors with name, sizes (fastest first), type and offset;
and the data, aligned. A file comes from a stranger: each count and length is held against the bytes that are left
before it is used, and nothing of it is executed.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

import torch

from mllm_compile.runtime.errors import CheckpointError
from mllm_compile.runtime.files.regular_file import open_regular
from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.runtime.weights.tensor_entry import TensorEntry, WeightHeader, broken

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 512 << 20
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 18
_MAX_NAME_BYTES = 255
_MAX_STRING_BYTES = 16 << 20  # of a value; a chat template is the longest
_MAX_ALIGNMENT = 1 << 20
_ALIGNMENT = 32
_MAX_DIMS = 4
_CHUNK_BYTES = 1 << 20
_HEADERS = 16  # that are remembered

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


class BlockType(NamedTuple):
    """How numbers are stored: `block` of them in `num_bytes` bytes; `dtype` is for plain ones, else None."""

    name: str
    block: int
    num_bytes: int
    dtype: torch.dtype | None = None


# By the number in the file (ggml.h, ggml-common.h).
BLOCK_TYPES: Mapping[int, BlockType] = MappingProxyType(
    {
        0: BlockType("F32", 1, 4, torch.float32),
        1: BlockType("F16", 1, 2, torch.float16),
        2: BlockType("Q4_0", 32, 18),
        3: BlockType("Q4_1", 32, 20),
        6: BlockType("Q5_0", 32, 22),
        7: BlockType("Q5_1", 32, 24),
        8: BlockType("Q8_0", 32, 34),
        10: BlockType("Q2_K", 256, 84),
        11: BlockType("Q3_K", 256, 110),
        12: BlockType("Q4_K", 256, 144),
        13: BlockType("Q5_K", 256, 176),
        14: BlockType("Q6_K", 256, 210),
        20: BlockType("IQ4_NL", 32, 18),
        23: BlockType("IQ4_XS", 256, 136),
        28: BlockType("F64", 1, 8, torch.float64),
        30: BlockType("BF16", 1, 2, torch.bfloat16),
        39: BlockType("MXFP4", 32, 17),
    }
)
_NOT_READ = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
    41: "Q1_0",
}


@dataclass(frozen=True)
class GgufHeader(WeightHeader):
    """
    Attributes:
        tensors: plain ones in their own dtype and shape; others as uint8, whose last dimension is a row's bytes.
        metadata: values by key: int, float, bool, str; arrays are tuples, of strings as bytes.
        types: the block type of each tensor.
    """

    metadata: Mapping[str, Any]
    types: Mapping[str, BlockType]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor's numbers."""
        *rows, last = self.tensors[name].shape
        kind = self.types[name]
        return (*rows, last if kind.dtype is not None else last // kind.num_bytes * kind.block)


def read_gguf(path: Path) -> GgufHeader:
    """Reads and checks the header of `path`. Errors name the user's file, which a link in the cache leads to.

    Raises:
        CheckpointError: the file is missing, truncated, damaged, or of a version or type that is not read.
    """
    try:
        if path.is_symlink() and os.path.isabs(target := os.readlink(path)):  # the hub's links are relative
            path = Path(target)
        facts = os.stat(path)
        return _read(path, facts.st_ino, facts.st_size, facts.st_mtime_ns)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


@lru_cache(maxsize=_HEADERS)
def _read(path: Path, inode: int, num_bytes: int, changed: int) -> GgufHeader:
    """A start looks at a header several times, and a vocabulary in it takes a tenth of a second."""
    with open(open_regular(path), "rb") as file:
        return _Reader(file, path, os.fstat(file.fileno()).st_size).header()


class _Reader:
    """Reads values one behind the other; never more bytes than the file has left, or a header may have."""

    def __init__(self, file: IO[bytes], path: Path, file_bytes: int) -> None:
        self._file, self._path, self._file_bytes = file, path, file_bytes
        self._data = bytearray()
        self._at = 0

    def header(self) -> GgufHeader:
        num_tensors, num_keys = self._counts()
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._name("key")
            if key in metadata:
                raise self._broken(f"the key {short_repr(key)} is there twice")
            metadata[key] = self._value(key, self._number("I"))
        infos = [self._tensor() for _ in range(num_tensors)]
        names = [name for name, *_ in infos]
        if len(set(names)) != len(names):
            raise self._broken("a tensor is there twice")
        types = {name: kind for name, kind, _, _ in infos}
        start = _aligned(self._at, alignment := self._alignment(metadata))
        tensors = {
            name: self._entry(name, kind, shape, start, offset, alignment) for name, kind, shape, offset in infos
        }
        self._check_apart(tensors)
        return GgufHeader(tensors, bytes(self._data[: self._at]), self._file_bytes, metadata, types)

    def _counts(self) -> tuple[int, int]:
        self._need(min(24, self._file_bytes))
        if self._data[:4] != MAGIC:
            raise self._broken("it does not begin with GGUF")
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
                raise CheckpointError(f"{self._path} is a GGUF file in big-endian order; expected little-endian.")
            known = " and ".join(map(str, _VERSIONS))
            raise CheckpointError(f"{self._path} is a GGUF file of version {version}; read are {known}.")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        if num_tensors > _MAX_TENSORS or num_keys > _MAX_KEYS:
            raise self._broken(f"it would have {num_tensors:,} tensors and {num_keys:,} keys")
        return num_tensors, num_keys

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        found = metadata.get("general.alignment", _ALIGNMENT)
        if type(found) is not int or not 1 <= found <= _MAX_ALIGNMENT or found & (found - 1):
            raise self._broken(
                f"general.alignment is {short_repr(found)}; expected a power of two up to {_MAX_ALIGNMENT:,}"
            )
        return found

    def _tensor(self) -> tuple[str, BlockType, tuple[int, ...], int]:
        name = self._name("tensor's name")
        num_dims = self._number("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._broken(f"tensor {short_repr(name)} has {num_dims} dimensions; expected 1 to {_MAX_DIMS}")
        sizes = tuple(self._number("Q") for _ in range(num_dims))
        number, offset = self._number("I"), self._number("Q")
        if (kind := BLOCK_TYPES.get(number)) is None:
            known = ", ".join(one.name for one in BLOCK_TYPES.values())
            raise CheckpointError(
                f"{self._path}: tensor {short_repr(name)} is stored as {_NOT_READ.get(number, f'type {number}')}, "
                f"which is not read; read are {known}. Take another file of the model, such as Q4_K_M or Q8_0."
            )
        if not all(0 < size < 2**40 for size in sizes) or math.prod(sizes) > 2**48 or sizes[0] % kind.block:
            raise self._broken(f"tensor {short_repr(name)} has sizes {list(sizes)} in blocks of {kind.block}")
        return name, kind, sizes[::-1], offset

    def _entry(
        self, name: str, kind: BlockType, shape: tuple[int, ...], start: int, offset: int, alignment: int
    ) -> TensorEntry:
        num_bytes = math.prod(shape) // kind.block * kind.num_bytes
        begin, end = start + offset, start + offset + num_bytes
        if offset % alignment or end > self._file_bytes:
            raise self._broken(f"tensor {short_repr(name)} is at bytes {begin:,} to {end:,} of {self._file_bytes:,}")
        if kind.dtype is not None:
            return TensorEntry(kind.dtype, shape, begin, end)
        return TensorEntry(torch.uint8, (*shape[:-1], shape[-1] // kind.block * kind.num_bytes), begin, end)

    def _check_apart(self, tensors: Mapping[str, TensorEntry]) -> None:
        last, name_of_last = 0, ""
        for name, entry in sorted(tensors.items(), key=lambda one: one[1].begin):
            if entry.begin < last:
                raise self._broken(f"tensors {short_repr(name_of_last)} and {short_repr(name)} overlap")
            last, name_of_last = entry.end, name

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text(f"the value of {short_repr(key)}", _MAX_STRING_BYTES)
        if kind != _ARRAY:
            return self._scalars(key, kind, 1)[0]
        of, count = self._number("I"), self._number("Q")
        if of == _ARRAY:
            raise self._broken(f"{short_repr(key)} is an array of arrays")
        return self._strings(count) if of == _STRING else self._scalars(key, of, count)

    def _scalars(self, key: str, kind: int, count: int) -> tuple[Any, ...]:
        code = _SCALARS.get(kind)
        if code is None:
            raise self._broken(f"{short_repr(key)} has a value of type {kind}")
        layout = self._layout(code, count)
        found = layout.unpack_from(self._data, self._take(layout.size))
        if kind == _BOOL and not {0, 1}.issuperset(found):
            raise self._broken(f"{short_repr(key)} is {short_repr(found[0])}; expected true or false")
        return tuple(map(bool, found)) if kind == _BOOL else found

    def _layout(self, code: str, count: int) -> struct.Struct:
        if count * struct.calcsize(f"<{code}") > self._file_bytes - self._at:
            raise self._broken(f"an array of {count:,} values ends behind it")
        return struct.Struct(f"<{count}{code}")

    def _strings(self, count: int) -> tuple[bytes, ...]:
        """A vocabulary has a hundred thousand: the loop calls nothing where the bytes are there."""
        if 8 * count > self._file_bytes - self._at:
            raise self._broken(f"an array of {count:,} strings ends behind it")
        found, data, at = [], self._data, self._at
        for _ in range(count):
            begin = at + 8
            end = begin + int.from_bytes(data[at:begin], "little")
            if end > len(data) or begin > len(data):
                self._at = at
                self._need(8)
                end = begin + int.from_bytes(data[at:begin], "little")
                self._need(end - at)
            found.append(bytes(data[begin:end]))
            at = end
        self._at = at
        return tuple(found)

    def _name(self, what: str) -> str:
        return self._text(f"a {what}", _MAX_NAME_BYTES)

    def _text(self, what: str, most: int) -> str:
        size = self._number("Q")
        if size > most:
            raise self._broken(f"{what} would have {size:,} bytes; expected at most {most:,}")
        begin = self._take(size)
        try:
            return self._data[begin : begin + size].decode()
        except UnicodeDecodeError:
            raise self._broken(f"{what} is no UTF-8") from None

    def _number(self, code: str) -> int:
        layout = struct.Struct(f"<{code}")
        number: int = layout.unpack_from(self._data, self._take(layout.size))[0]
        return number

    def _take(self, num_bytes: int) -> int:
        """The place of the next bytes in the data, which has them."""
        self._need(num_bytes)
        self._at += num_bytes
        return self._at - num_bytes

    def _need(self, num_bytes: int) -> None:
        end = self._at + num_bytes
        if end > self._file_bytes:
            raise self._broken("it ends within its header")
        if end > _MAX_HEADER_BYTES:
            raise self._broken(f"its header is longer than {_MAX_HEADER_BYTES:,} bytes")
        while len(self._data) < end:
            more = self._file.read(max(_CHUNK_BYTES, end - len(self._data)))
            if not more:
                raise self._broken("it ends within its header")
            self._data += more

    def _broken(self, why: str) -> CheckpointError:
        return CheckpointError(broken(self._path, why))


def _aligned(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment
