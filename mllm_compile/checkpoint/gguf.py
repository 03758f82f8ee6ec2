"""The tensors of GGUF files under Transformers' names; what a converter has changed is changed back.

Rearrangements are views. Weights that are computed, or take scattered rows, are formats of runtime/weights/formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from mllm_compile.checkpoint.planned_tensor import PlannedTensor, joined
from mllm_compile.checkpoint.quantised import CheckpointTensors
from mllm_compile.errors import CheckpointError
from mllm_compile.gguf.architectures import Architecture, Change
from mllm_compile.gguf.config import ROPE_TENSORS, architecture_of
from mllm_compile.gguf.facts import ARCHITECTURE_KEY
from mllm_compile.gguf.metadata import Metadata
from mllm_compile.runtime.weights.formats.base import VALUES, Format, Quantised, StoredTensor
from mllm_compile.runtime.weights.formats.gguf import format_name
from mllm_compile.runtime.weights.formats.gguf_changes import (
    GATES,
    GROUPS,
    NEGATED_EXPONENTIALS,
    PLUS_ONE,
    UP,
    type_numbers,
)
from mllm_compile.runtime.weights.formats.settings import Settings
from mllm_compile.runtime.weights.gguf_header import BlockType, GgufHeader, read_gguf
from mllm_compile.runtime.weights.header import read_bytes

_IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_GATE_OR_UP = re.compile(r"blk\.(\d+)\.ffn_(gate|up)_exps\.(weight|bias)")


def read_gguf_tensors(folder: Path, files: Iterable[str]) -> CheckpointTensors:
    """Reads the headers of all `files`; the first has the metadata.

    Raises:
        CheckpointError: a file is corrupt, or a tensor is in two of them.
        UnsupportedModelError: the architecture is not read.
    """
    headers = {file: read_gguf(folder / file) for file in files}
    first = next(iter(headers))
    stored: dict[str, StoredTensor] = {}
    for file, header in headers.items():
        for name, entry in header.tensors.items():
            if name in stored:
                raise CheckpointError(f"tensor {name!r} is in {stored[name].file} and in {file}. Download them again.")
            stored[name] = StoredTensor(name, file, entry.shape, entry.dtype)

    def read(one: StoredTensor) -> bytes:
        return read_bytes(folder / one.file, headers[one.file].tensors[one.name])

    metadata = Metadata(folder / first, headers[first].metadata)
    mapping = _Mapping(architecture_of(metadata, stored), metadata, headers)
    planned: dict[str, PlannedTensor] = {}
    gates: dict[tuple[str, str], dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        if (part := _GATE_OR_UP.fullmatch(name)) is not None:
            gates.setdefault((part[1], part[3]), {})[part[2]] = tensor
        elif name not in ROPE_TENSORS:
            planned[mapping.name(name)] = mapping.planned(tensor)
    for (layer, suffix), parts in gates.items():
        if parts.keys() != {"gate", "up"}:
            raise CheckpointError(f"{folder / first}: layer {layer} lacks experts' gate or up. Download it again.")
        planned |= mapping.gate_up(layer, suffix, parts["gate"], parts["up"])
    return CheckpointTensors(stored, planned, read)


class _Mapping:
    def __init__(self, architecture: Architecture, metadata: Metadata, headers: Mapping[str, GgufHeader]) -> None:
        self._architecture, self._metadata, self._headers = architecture, metadata, headers
        self._prefix = metadata.get(ARCHITECTURE_KEY, str)

    def name(self, name: str) -> str:
        """Transformers' name; one that is not known stays, and is refused as one that has no place."""
        number, whole, base, suffix = _parts(name)
        names = self._architecture.names
        if (theirs := names.get(whole)) is not None:
            return theirs.format(number)
        theirs = names.get(base)
        return name if theirs is None else theirs.format(number) + suffix

    def planned(self, tensor: StoredTensor) -> PlannedTensor:
        """The tensor as the model has it."""
        _, whole, base, _ = _parts(tensor.name)
        changes = self._architecture.changes
        change = changes.get(whole, changes.get(base))
        return self._plain(tensor) if change is None else _UNDO[change](self, tensor)

    def gate_up(self, layer: str, suffix: str, gate: StoredTensor, up: StoredTensor) -> dict[str, PlannedTensor]:
        """The tensor that gates and ups of a layer's experts make."""
        name = self._architecture.gate_up.format(layer)
        if not self._architecture.gates_by_turns:
            return {name: joined((self._plain(gate), self._plain(up)), 1)}
        planned = self._changed(GATES[suffix], {VALUES: gate, UP: up})
        return {f"{name}_bias": planned} if suffix == "bias" else {name: planned.transpose(1, 2)}

    def _plain(self, tensor: StoredTensor) -> PlannedTensor:
        kind = self._kind(tensor)
        quantised = Quantised(format_name(kind), {VALUES: tensor}, {}) if kind.dtype is None else None
        return PlannedTensor.of_file(tensor.name, tensor.file, self._shape(tensor), quantised)

    def _changed(self, fmt: Format, tensors: Mapping[str, StoredTensor], **numbers: int) -> PlannedTensor:
        """The tensor that a format makes of others."""
        types = type_numbers({role: self._kind(one) for role, one in tensors.items()})
        shape, known = fmt.layout(tensors, Settings(), types | numbers)
        values = tensors[VALUES]
        return PlannedTensor.of_file(values.name, values.file, shape, Quantised(fmt.name, tensors, known))

    def _in_halves(self, tensor: StoredTensor, heads: int) -> PlannedTensor:
        """The rows of each head in two halves that turn together; converters have put them into pairs."""
        planned = self._plain(tensor)
        rows, *inner = planned.shape
        if not heads or rows % (2 * heads):
            raise CheckpointError(f"{tensor.file}: {tensor} has {rows} rows for {heads} heads. Download it again.")
        pairs = planned.reshape(heads, rows // heads // 2, 2, *inner)
        return pairs.transpose(1, 2).reshape(rows, *inner)

    def _in_groups(self, tensor: StoredTensor) -> PlannedTensor:
        """Each group's queries, key and value behind each other."""
        heads, groups = self._heads(), self._kv_heads()
        if not groups or heads % groups:
            raise CheckpointError(f"{tensor.file}: {heads} heads for {groups} KV heads. Download it again.")
        return self._changed(GROUPS, {VALUES: tensor}, groups=groups, queries=heads // groups)

    def _heads(self) -> int:
        return int(self._metadata.number(f"{self._prefix}.attention.head_count") or 0)

    def _kv_heads(self) -> int:
        return int(self._metadata.number(f"{self._prefix}.attention.head_count_kv") or self._heads())

    def _kind(self, tensor: StoredTensor) -> BlockType:
        return self._headers[tensor.file].types[tensor.name]

    def _shape(self, tensor: StoredTensor) -> tuple[int, ...]:
        return self._headers[tensor.file].shape(tensor.name)


_UNDO: Mapping[Change, Callable[[_Mapping, StoredTensor], PlannedTensor]] = {
    Change.PAIRS_OF_QUERIES: lambda mapping, tensor: mapping._in_halves(tensor, mapping._heads()),
    Change.PAIRS_OF_KEYS: lambda mapping, tensor: mapping._in_halves(tensor, mapping._kv_heads()),
    Change.PLUS_ONE: lambda mapping, tensor: mapping._changed(PLUS_ONE, {VALUES: tensor}),
    Change.TRANSPOSED: lambda mapping, tensor: mapping._plain(tensor).transpose(-1, -2),
    Change.NO_ROWS: lambda mapping, tensor: _with_dim(mapping._plain(tensor), 0),
    Change.NO_CHANNELS: lambda mapping, tensor: mapping._plain(tensor).unsqueeze(1),
    Change.NEGATED_EXPONENTIALS: lambda mapping, tensor: mapping._changed(NEGATED_EXPONENTIALS, {VALUES: tensor}),
    Change.APART: lambda mapping, tensor: mapping._in_groups(tensor),
}


def _parts(name: str) -> tuple[str, str, str, str]:
    """A name's layer, the name with {} in its place, that without its suffix, and the suffix."""
    number = ""
    if (layer := _IN_LAYER.fullmatch(name)) is not None:
        number, name = layer[1], f"blk.{{}}.{layer[2]}"
    base, dot, suffix = name.rpartition(".")
    return (number, name, base, dot + suffix) if suffix in ("weight", "bias") else (number, name, name, "")


def _with_dim(planned: PlannedTensor, dim: int) -> PlannedTensor:
    return planned.unsqueeze(dim) if planned.ndim == 1 else planned
