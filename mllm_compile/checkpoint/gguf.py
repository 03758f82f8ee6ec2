"""The tensors of GGUF files under Transformers' names, as the model has them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from mllm_compile.checkpoint.gguf_changes import ModelTensors
from mllm_compile.checkpoint.planned_tensor import PlannedTensor
from mllm_compile.checkpoint.quantised import CheckpointTensors
from mllm_compile.errors import CheckpointError
from mllm_compile.gguf.architectures import Architecture, Change
from mllm_compile.gguf.config import ROPE_TENSORS, architecture_of
from mllm_compile.gguf.metadata import Metadata
from mllm_compile.runtime.weights.formats.base import StoredTensor
from mllm_compile.runtime.weights.gguf_header import read_gguf
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
    architecture, tensors = architecture_of(metadata, stored), ModelTensors(metadata, headers)
    names = _Names(architecture)
    planned: dict[str, PlannedTensor] = {}
    gates: dict[tuple[str, str], dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        if name in ROPE_TENSORS or _predicts_further(name, tensors):
            continue
        if (part := _GATE_OR_UP.fullmatch(name)) is not None:
            gates.setdefault((part[1], part[3]), {})[part[2]] = tensor
        else:
            planned[names.name(name)] = tensors.of(tensor, names.change(name))
    for (layer, suffix), parts in gates.items():
        if parts.keys() != {"gate", "up"}:
            raise CheckpointError(f"{folder / first}: layer {layer} lacks experts' gate or up. Download it again.")
        name, both = architecture.gate_up.format(layer), (parts["gate"], parts["up"])
        if not architecture.gates_by_turns:
            planned[name] = tensors.gate_behind_up(*both)
        else:
            planned[name if suffix == "weight" else f"{name}_bias"] = tensors.gate_and_up_by_turns(*both, suffix)
    return CheckpointTensors(stored, planned, read)


class _Names:
    """The names and changes of an architecture's tensors."""

    def __init__(self, architecture: Architecture) -> None:
        self._architecture = architecture

    def name(self, name: str) -> str:
        """Transformers' name; one that is not known stays, and is refused as one that has no place."""
        number, whole, base, suffix = _parts(name)
        names = self._architecture.names
        if (theirs := names.get(whole)) is not None:
            return theirs.format(number)
        theirs = names.get(base)
        return name if theirs is None else theirs.format(number) + suffix

    def change(self, name: str) -> Change | None:
        """A converter's change of the tensor, or None."""
        _, whole, base, _ = _parts(name)
        changes = self._architecture.changes
        return changes.get(whole, changes.get(base))


def _parts(name: str) -> tuple[str, str, str, str]:
    """A name's layer, the name with {} in its place, that without its suffix, and the suffix."""
    number = ""
    if (layer := _IN_LAYER.fullmatch(name)) is not None:
        number, name = layer[1], f"blk.{{}}.{layer[2]}"
    base, dot, suffix = name.rpartition(".")
    return (number, name, base, dot + suffix) if suffix in ("weight", "bias") else (number, name, name, "")


def _predicts_further(name: str, tensors: ModelTensors) -> bool:
    """True for a tensor of the last layers where these predict further tokens: the model has none."""
    extra, layer = tensors.number("nextn_predict_layers"), _IN_LAYER.fullmatch(name)
    return extra > 0 and layer is not None and int(layer[1]) >= tensors.number("block_count") - extra
