"""Finds the quantised weights of a checkpoint by its tensors, and says of each what it is and how it is stored.

To all that follows (Transformers' renaming, stacking of experts, packing) such a weight is a tensor of its own shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from mllm_compile.checkpoint.planned_tensor import PlannedTensor
from mllm_compile.config.folders.quantisation import Scheme
from mllm_compile.errors import CheckpointError
from mllm_compile.runtime.weights.formats.base import VALUES, Format, Quantised, ReadBytes, StoredTensor, lacks
from mllm_compile.runtime.weights.formats.registry import FORMATS
from mllm_compile.runtime.weights.header import read_bytes, read_header
from mllm_compile.runtime.weights.spec import WeightSpec
from mllm_compile.runtime.weights.tensor_entry import TensorEntry

_NO_INDEX: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class CheckpointTensors:
    """
    Attributes:
        stored: the tensors of the files, by name.
        planned: what a model sees of them, by name: quantised weights in their own shape.
        read: reads the data of one tensor.
        unused: names of scales that are not applied.
        unlisted: names that the index of the files lacks: those that the model has no place for are left out.
    """

    stored: Mapping[str, StoredTensor]
    planned: Mapping[str, PlannedTensor]
    read: ReadBytes
    unused: tuple[str, ...] = ()
    unlisted: frozenset[str] = frozenset()

    def is_empty_bias(self, name: str) -> bool:
        """True for a bias of zeros beside a quantised weight: GPTQ's tools give one to every linear.

        Raises:
            CheckpointError: it cannot be read.
        """
        weight = self.planned.get(name.removesuffix(".bias") + ".weight")
        if not name.endswith(".bias") or weight is None or not any(block.quantised for block in weight.blocks):
            return False
        return not any(self.read(self.stored[name]))

    def line(self, dtype: torch.dtype, are_kept: bool) -> str | None:
        """The line on what becomes of the quantised weights; None without such weights.

        Args:
            dtype: the model's.
            are_kept: in linears, which only the trace tells.
        """
        blocks = [block for tensor in self.planned.values() for block in tensor.blocks]
        formats = [block.quantised.format for block in blocks if block.quantised]
        file_bytes = sum(tensor.num_bytes for tensor in self.stored.values())
        memory_bytes = sum(tensor.shape.numel() for tensor in self.planned.values()) * dtype.itemsize
        name = str(dtype).removeprefix("torch.")
        if formats and are_kept:
            return (
                f"weights: {file_bytes / 1e9:,.2f} GB, stored as {_named(formats)}; linears keep them so in memory, "
                f"elsewhere they are dequantised to {name}"
            )
        return dequantised_line(formats, name, file_bytes, memory_bytes) if formats else None


def read_tensors(
    folder: Path, files: Iterable[str], scheme: Scheme | None, weight_map: Mapping[str, str] = _NO_INDEX
) -> CheckpointTensors:
    """Reads the headers of all `files`.

    Args:
        weight_map: tensor → file, as the index says: of several copies of a tensor it names the one that counts.

    Raises:
        CheckpointError: a file is corrupt; a tensor is in two files and the index names neither; or a weight or a scale
            is missing, or does not fit the other.
    """
    copies: dict[str, dict[str, TensorEntry]] = {}
    for file in files:
        for name, entry in read_header(folder / file).tensors.items():
            copies.setdefault(name, {})[file] = entry
    stored: dict[str, StoredTensor] = {}
    entries: dict[str, TensorEntry] = {}
    for name, by_file in copies.items():
        file = _meant_file(name, list(by_file), weight_map.get(name))
        entry = entries[name] = by_file[file]
        stored[name] = StoredTensor(name, file, entry.shape, entry.dtype)
    unlisted = frozenset(name for name in stored if name not in weight_map) if weight_map else frozenset()

    def read(one: StoredTensor) -> bytes:
        return read_bytes(folder / one.file, entries[one.name])

    if scheme is None:
        planned = {name: _plain(tensor) for name, tensor in stored.items()}
        return CheckpointTensors(stored, planned, read, unlisted=unlisted)
    return _Reader(stored, scheme, read, unlisted).read()


def dequantised_line(formats: Iterable[str], dtype: str, file_bytes: int, memory_bytes: int) -> str:
    """The line on quantised weights that are all dequantised."""
    return (
        f"weights: {file_bytes / 1e9:,.2f} GB, stored as {_named(formats)}, are dequantised to "
        f"{dtype} while they are read and take {memory_bytes / 1e9:,.2f} GB of memory"
    )


def lines_on_weights(specs: Sequence[WeightSpec], dtype: str) -> list[str]:
    """The lines on what becomes of a program's weights, where any is quantised in memory or in the checkpoint."""
    parts = [(spec, part) for spec in specs for part in spec.parts]
    kept = [spec for spec in specs if any(part.kept for part in spec.parts)]
    dequantised = [part for _, part in parts if part.quantised and not part.kept]
    memory_bytes = sum(spec.num_bytes for spec in specs)
    if not kept:
        file_bytes = sum(spec.num_bytes_read for spec in specs)
        formats = [part.quantised.format for part in dequantised if part.quantised]
        return [dequantised_line(formats, dtype, file_bytes, memory_bytes)] if formats else []
    kinds = {part.kept.scheme.name for _, part in parts if part.kept}
    stored = {part.quantised.format for _, part in parts if part.kept and part.quantised}
    how = f"as they are stored, {_named(stored)}" if stored else "quantised while they are read"
    kept_bytes = sum(spec.num_bytes for spec in kept)
    lines = [
        f"weights: {memory_bytes / 1e9:,.2f} GB of memory, of it {kept_bytes / 1e9:,.2f} GB of linears in "
        f"{' and '.join(sorted(kinds))}, {how}"
    ]
    if dequantised:
        formats = [part.quantised.format for part in dequantised if part.quantised]
        lines.append(
            f"weights: {len(dequantised)} that are quantised in the checkpoint, such as {dequantised[0].tensor!r} "
            f"({_named(formats)}), are dequantised to {dtype}: they are no linears, or linears do not compute so"
        )
    return lines


def _named(formats: Iterable[str]) -> str:
    return " and ".join(sorted(set(formats)))


def _meant_file(name: str, files: Sequence[str], listed: str | None) -> str:
    """The file of `files`, which all hold the tensor, that it is read from: the one that the index lists."""
    if len(files) == 1:
        return files[0]
    if listed is not None and listed in files:
        return listed
    raise CheckpointError(
        f"tensor {name!r} is in {files[0]} and in {files[1]}: which one is meant? Name one of them in the index, "
        "model.safetensors.index.json, or remove the other."
    )


def _plain(tensor: StoredTensor) -> PlannedTensor:
    return PlannedTensor.of_file(tensor.name, tensor.file, tensor.shape)


class _Reader:
    def __init__(
        self, stored: Mapping[str, StoredTensor], scheme: Scheme, read: ReadBytes, unlisted: frozenset[str]
    ) -> None:
        self._stored = stored
        self._unlisted = unlisted
        self._scheme = scheme
        self._read_bytes = read
        self._formats = [FORMATS[name] for name in scheme.formats]

    def read(self) -> CheckpointTensors:
        planned: dict[str, PlannedTensor] = {}
        taken: dict[str, str] = {}
        for name, tensor in self._stored.items():
            if (found := self._format_of(tensor)) is not None:
                fmt, base = found
                weight = base + fmt.plain
                is_plain_too = weight != name and weight in self._stored
                if name in self._unlisted and (is_plain_too or self._missing(fmt, base)):
                    continue
                if weight in planned or (is_plain_too and weight not in self._unlisted):
                    other = taken.get(weight, weight)
                    raise CheckpointError(f"{tensor.file}: {other!r} and {name!r} both stand for {weight!r}")
                planned[weight] = self._weight(fmt, base, taken)
        for name, tensor in self._stored.items():
            if name not in taken and name not in self._unlisted:
                self._check_owner(tensor)
        unused = tuple(name for name in self._stored if name not in taken and name.endswith(self._scheme.unused))
        rest = (tensor for name, tensor in self._stored.items() if name not in taken and name not in unused)
        planned |= {tensor.name: _plain(tensor) for tensor in rest}
        return CheckpointTensors(self._stored, planned, self._read_bytes, unused, self._unlisted)

    def _format_of(self, tensor: StoredTensor) -> tuple[Format, str] | None:
        """The format of a tensor of values, and its weight's base; None for any other.

        Some formats name values alike: of those whose tensors are all there, the one with the most is taken.
        """
        fits = [(fmt, base) for fmt in self._formats if (base := _base(fmt, VALUES, tensor)) is not None]
        whole = [one for one in fits if not self._missing(*one)]
        return max(whole or fits, key=lambda one: len(one[0].roles), default=None)

    def _missing(self, fmt: Format, base: str) -> list[str]:
        names = [base + suffix for role, suffix in fmt.roles.items() if role not in fmt.optional]
        return [name for name in names if name not in self._stored]

    def _weight(self, fmt: Format, base: str, taken: dict[str, str]) -> PlannedTensor:
        if missing := self._missing(fmt, base):
            values = self._stored[base + fmt.roles[VALUES]]
            raise lacks(values, missing[0], f"{fmt.name} has them")
        tensors = {
            role: self._stored[base + suffix] for role, suffix in fmt.roles.items() if base + suffix in self._stored
        }
        values = tensors[VALUES]
        if 0 in values.shape:
            raise CheckpointError(f"{values.file}: {values} holds no values. Download the checkpoint again.")
        details = fmt.details(tensors, self._read_bytes)
        shape, numbers = fmt.layout(tensors, self._scheme.settings, details)
        taken |= {tensor.name: values.name for tensor in tensors.values()} | {base + fmt.plain: values.name}
        quantised = Quantised(fmt.name, tensors, {**details, **numbers})
        weight = PlannedTensor.of_file(values.name, values.file, shape, quantised)
        return weight.transpose(-1, -2).contiguous() if fmt.transposed else weight

    def _check_owner(self, tensor: StoredTensor) -> None:
        """Refuses what would go with a quantised weight that is not there, or is not quantised."""
        for fmt in self._formats:
            for role in fmt.roles:
                base = None if role == VALUES else _base(fmt, role, tensor)
                if base is None:
                    continue
                name = base + fmt.roles[VALUES]
                owner = self._stored.get(name)
                found = f"there is no {name!r}" if owner is None else f"{owner} is not quantised that way"
                raise CheckpointError(
                    f"{tensor.file}: {tensor} goes with a weight as {fmt.name} has them, but {found}. Download the "
                    "checkpoint again."
                )


def _base(fmt: Format, role: str, tensor: StoredTensor) -> str | None:
    """The name without the role's suffix, where the tensor may have that role."""
    suffix = fmt.roles[role]
    if not tensor.name.endswith(suffix) or (role == VALUES and tensor.dtype not in fmt.values_dtypes):
        return None
    return tensor.name[: len(tensor.name) - len(suffix)]
